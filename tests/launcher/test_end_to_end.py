"""Plain torchrun scripts under ``rackrun``: they run, start again after a loss, and end with the right code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.waiting import wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"rank {rank} of {dist.get_world_size()} restart {restarts}\\n".encode())
total = torch.ones(1)
dist.all_reduce(total)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if rank == 1 and restarts == 0 and what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and what == "abort":
    os.abort()
if rank == 1 and what == "raise":
    raise ValueError("a bug of mine")
if what == "wait":
    Path(f"up-{rank}-{restarts}-{os.environ['TORCHELASTIC_RUN_ID']}").touch()
    while not Path("go").exists():
        time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return "train.py"


def result(out_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out_dir / "result.json").read_text())
    return found


def up(tmp_path: Path, restarts: int, ranks: int = 2) -> Callable[[], bool]:
    return lambda: len(list(tmp_path.glob(f"up-*-{restarts}-*"))) >= ranks


def test_a_plain_script_runs_and_the_run_is_tidy(run_rackrun: Callable[..., Any], script: str) -> None:
    idle = ["--checkpoint-dir", "checkpoints", "--check-replicas", "5"]
    ran = run_rackrun(["--standalone", "--nproc-per-node", "3", "--spares", "1", *idle, script])
    assert ran.exit_code == 0, ran
    assert "--checkpoint-dir, --check-replicas did nothing: the script has no @rackrun.elastic" in ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["rank 0 of 2 restart 0", "rank 1 of 2 restart 0"]
    assert result(ran.out_dir)["exit_code"] == 0
    assert not (ran.out_dir / "token").exists()
    assert not (ran.out_dir / "endpoint.json").exists()
    assert (ran.out_dir / "journal.sqlite").stat().st_size > 0
    assert not (ran.out_dir / "journal.sqlite-wal").exists()


ENDS = """
import atexit, os
atexit.register(lambda: os.write(2, f"ends {os.getpid()}\\n".encode()))
"""


@pytest.mark.parametrize(("what", "code"), [("", 0), pytest.param("raise", 1, marks=pytest.mark.stories)])
def test_the_last_word_is_not_a_librarys_of_what_it_has_leaked(
    what: str, code: int, start_rackrun: Callable[..., Any], script: str, tmp_path: Path
) -> None:
    """And who is preloaded has its exit handlers called, in the launcher as well."""
    (tmp_path / "ending.py").write_text(ENDS)
    here = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "--preload", "ending", script, what]
    job = start_rackrun(arguments, env={"PYTHONPATH": here})
    ran = job.finish(60.0)
    assert ran.exit_code == code, ran
    assert "nanobind" not in ran.stderr, ran
    assert "leaked" not in ran.stderr, ran
    assert f"ends {job.process.pid}" in ran.stderr, ran
    assert ("ValueError: a bug of mine" in ran.stderr) is bool(code), ran


LETS_GO = """
import weakref
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # whoever ends while another still connects makes that one fail
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("outlives its end:", group() is not None)
"""


def test_a_plain_scripts_process_group_outlives_its_end(run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    """Else DDP may be the last that holds it, and its destructor waits for a thread that waits for the interpreter's lock."""
    (tmp_path / "train.py").write_text(LETS_GO)
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", "train.py"])
    assert ran.exit_code == 0, ran
    assert ran.stdout.splitlines() == ["outlives its end: True"] * 2


def test_a_killed_rank_starts_all_again_and_is_named(run_rackrun: Callable[..., Any], script: str) -> None:
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", script, "die"])
    assert ran.exit_code == 0, ran
    assert "rank 1 of 2 restart 1" in ran.stdout
    assert "rank 1 lost on tray-00/1 (SIGKILL) -> all 2 workers start again" in ran.stderr


UNBUILT = """
import os
from rackrun.worker.membership import communicator_builder as builder
build, times = builder.build_communicator, int(os.environ["UNBUILT"])
def without_memory(*given):
    if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < times:
        raise RuntimeError("Failed to CUDA calloc async 12 bytes")
    return build(*given)
builder.build_communicator = without_memory

import torch, rackrun
from torch.nn.parallel import DistributedDataParallel as DDP

@rackrun.elastic(global_batch_size=4, micro_batch_size=2, seed=1)
def main(run):
    model = DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader([torch.ones(2)] * 100)

    @run.step
    def train_step(step):
        for x in data:
            step.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(3):
        train_step(step)

main()
"""


@pytest.mark.parametrize(
    ("times", "code"), [pytest.param(1, 0, marks=pytest.mark.stories), (2, 3)], ids=["once", "always"]
)
def test_groups_that_cannot_be_built_at_the_start_do_not_hang(
    run_rackrun: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, code: int
) -> None:
    """All have come, and one has no memory for NCCL's buffers: the others wait for it in their own builds."""
    monkeypatch.setenv("UNBUILT", str(times))
    (tmp_path / "train.py").write_text(UNBUILT)
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"])
    assert ran.exit_code == code, ran
    assert "rank 1 lost on tray-00/1 (could not build its groups) -> all 2 workers start again" in ran.stderr
    stopped = "rank 1 could not build its groups (Failed to CUDA calloc async 12 bytes); restarted 1 of 1 times"
    assert (stopped in ran.stderr) == (code == 3)


def test_a_failing_script_ends_with_1_its_traceback_and_its_rank(run_rackrun: Callable[..., Any], script: str) -> None:
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", script, "raise"])
    assert ran.exit_code == 1, ran
    assert "the script failed on rank 1: ValueError: a bug of mine" in ran.stderr
    assert 'raise ValueError("a bug of mine")' in ran.stderr
    assert result(ran.out_dir)["exit_code"] == 1


def test_a_rank_that_ends_by_a_signal_of_its_own_says_where(run_rackrun: Callable[..., Any], script: str) -> None:
    """A library that aborts says a word, or nothing, and whose call it was is nowhere."""
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", "--max-restarts", "0", script, "abort"])
    assert ran.exit_code == 3, ran
    assert "SIGABRT" in ran.stderr
    assert "Fatal Python error: Aborted" in ran.stderr
    at = SCRIPT.splitlines().index("    os.abort()") + 1
    assert f'train.py", line {at} in <module>' in ran.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.stories)]
)
def test_a_signal_ends_the_job_and_leaves_nobody(
    start_rackrun: Callable[..., Any], tmp_path: Path, script: str, number: signal.Signals, code: int
) -> None:
    job = start_rackrun(["--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "2", script, "wait"])
    wait_until(up(tmp_path, 0), 30)
    job.process.send_signal(number)
    ran = job.finish(30)
    assert ran.exit_code == code, ran
    assert not ran.left_behind
    assert result(ran.out_dir)["because"] == number.name


def test_everything_dies_with_the_launcher(start_rackrun: Callable[..., Any], tmp_path: Path, script: str) -> None:
    job = start_rackrun(["--standalone", "--nproc-per-node", "2", script, "wait"])
    wait_until(up(tmp_path, 0), 30)
    job.process.kill()
    ran = job.finish(30)
    assert ran.exit_code == -signal.SIGKILL
    assert not ran.left_behind


@pytest.mark.stories
def test_a_killed_agent_is_replaced_under_its_own_name(
    start_rackrun: Callable[..., Any], tmp_path: Path, script: str
) -> None:
    """The spare of another tray takes the lost rank over; the new agent's slot is the spare of the next failure."""
    job = start_rackrun(["--standalone", "--trays", "3", "--spares", "1", script, "wait"])
    wait_until(up(tmp_path, 0), 30)
    os.kill(children(job.process.pid)[1], signal.SIGKILL)
    wait_until(up(tmp_path, 1), 30)
    wait_until(lambda: len(status_of(job.out_dir)["trays"]) == 3, 30)
    (tmp_path / "go").touch()
    ran = job.finish(30)
    assert ran.exit_code == 0, ran
    assert "rank 1 lost on tray-01/0 (tray lost:" in ran.stderr


@pytest.mark.stories
def test_the_only_agent_is_killed_and_all_begin_again(
    start_rackrun: Callable[..., Any], tmp_path: Path, script: str
) -> None:
    job = start_rackrun(["--standalone", "--nproc-per-node", "2", script, "wait"])
    wait_until(up(tmp_path, 0), 30)
    os.kill(children(job.process.pid)[0], signal.SIGKILL)
    wait_until(up(tmp_path, 1), 30)
    (tmp_path / "go").touch()
    ran = job.finish(30)
    assert ran.exit_code == 0, ran
    assert "2 ranks need a slot. Waiting for tray-00 (its agent is started again)" in ran.stderr


@pytest.mark.soak
def test_a_stopped_agent_is_fenced_when_its_lease_ends(
    start_rackrun: Callable[..., Any], tmp_path: Path, script: str
) -> None:
    job = start_rackrun(["--standalone", "--trays", "3", "--spares", "1", script, "wait"])
    wait_until(up(tmp_path, 0), 30)
    os.kill(children(job.process.pid)[1], signal.SIGSTOP)
    wait_until(up(tmp_path, 1), 40)
    wait_until(lambda: len(status_of(job.out_dir)["trays"]) == 3, 30)
    (tmp_path / "go").touch()
    ran = job.finish(10)
    assert ran.exit_code == 0, ran
    assert not ran.left_behind


@pytest.mark.soak
def test_a_preload_that_leaves_a_thread_behind_is_not_forked(
    run_rackrun: Callable[..., Any], tmp_path: Path, script: str
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    here = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ["--standalone", "--nproc-per-node", "2", "--preload", "threaded", script]
    ran = run_rackrun(arguments, env={"PYTHONPATH": here})
    assert ran.exit_code == 0, ran
    assert "rank 1 of 2 restart 0" in ran.stdout


@pytest.mark.stories
def test_two_launchers_meet_and_end_alike(start_rackrun: Callable[..., Any], tmp_path: Path, script: str) -> None:
    from tests.launcher.test_bad_input import _free_port

    token = tmp_path / "job.token"
    token.write_text("a-secret-of-more-than-16-characters")
    token.chmod(0o600)
    meet = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}", "--rdzv-id", "together"]
    jobs = []
    for node_rank in ("0", "1"):
        jobs.append(start_rackrun([*meet, "--token-file", token, "--node-rank", node_rank, script, "wait"]))
        if node_rank == "0":
            wait_until((jobs[0].out_dir / "endpoint.json").exists, 30)
    wait_until(up(tmp_path, 0), 30)
    (tmp_path / "go").touch()
    ran = [job.finish(30) for job in jobs]
    assert [one.exit_code for one in ran] == [0, 0], f"{ran[0]}\n{ran[1]}"
    assert "rank 0 of 2 restart 0" in ran[0].stdout
    assert "rank 1 of 2 restart 0" in ran[1].stdout
    assert not any(one.left_behind for one in ran)


def rackctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-m", "rackrun.ctl", *arguments], capture_output=True, text=True, env=env)


def status_of(out_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rackctl("status", str(out_dir), "--json").stdout)
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


RESUMES = """
import os, torch, rackrun
from torch.nn.parallel import DistributedDataParallel as DDP

@rackrun.elastic(global_batch_size=4, micro_batch_size=int(os.environ.get("MICRO", 1)))
def main(run):
    model = DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = run.loader([torch.ones(2)] * 8)

    @run.step
    def step(step):
        for batch in data:
            step.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(3):
        step(number)

main()
"""


def test_a_directory_of_another_training_is_refused_in_one_line(
    run_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(RESUMES)
    arguments = ["--standalone", "--nproc-per-node", "2", "--checkpoint-dir", "checkpoints", "train.py"]
    assert run_rackrun(arguments).exit_code == 0
    ran = run_rackrun(arguments, env={"MICRO": "2"})
    assert ran.exit_code == 1, ran
    (line,) = ran.stderr.splitlines()
    assert line.startswith("rackrun: stopped (exit code 1): ")
    assert "micro_batch_size=1" in line
    assert "Remedy: resume with the same, or give another --checkpoint-dir" in line


def test_a_full_directory_of_checkpoints_is_refused_in_one_line(
    run_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    full = """
import errno
from rackrun.checkpoint.durable.lease import Lease

def take(self):
    raise OSError(errno.ENOSPC, "No space left on device")

Lease.take = take
"""
    (tmp_path / "train.py").write_text(full + RESUMES)
    ran = run_rackrun(["--standalone", "--nproc-per-node", "2", "--checkpoint-dir", "checkpoints", "train.py"])
    assert ran.exit_code == 1, ran
    (line,) = ran.stderr.splitlines()
    assert "checkpoints cannot be used: [Errno 28] No space left on device. Remedy: look at its room" in line
