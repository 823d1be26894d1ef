"""Whole jobs whose doors are knocked at, whose streams are closed, and whose hosts speak IPv6: they go on as ever."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launcher.flood import Flood, listening, torchs_stores
from tests.launcher.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.stories]

WAIT_S = 50.0
TRAINS = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import rackrun

@rackrun.elastic(global_batch_size=8, micro_batch_size=2)
def main(run):
    torch.manual_seed(1)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader([torch.full((4,), n / 64) for n in range(64)])

    @run.step
    def train(step):
        for x in loader:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(12):
        if number == 5 and run.rank == 1 and not Path("struck").exists():
            Path("ready").touch()
            while not Path("strike").exists():
                time.sleep(0.01)
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(number)
    if run.rank == 0:
        print("digest", torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes().hex(), flush=True)
main()
"""
PLAIN = """
import os, sys, time
from pathlib import Path
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"up-{attempt}-{os.environ['RANK']}").write_text(str(os.getppid()))
while not Path("go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "plain.py").write_text(PLAIN)
    return "trains.py"


def digest(ran: Any) -> str:
    found = re.search(r"digest (\w+)", ran.stdout)
    assert found, ran
    return found[1]


@pytest.fixture
def floods() -> Iterator[list[Flood]]:
    begun: list[Flood] = []
    yield begun
    for flood in begun:
        flood.end()


def test_a_flood_at_every_door_while_a_rank_is_killed(
    start_rackrun: Callable[..., Any], tmp_path: Path, script: str, floods: list[Flood]
) -> None:
    """With few descriptors in every process of the job."""
    arguments = ["--standalone", "--nproc-per-node", "3", "--spares", "1", script]
    job = start_rackrun(arguments)
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    wait_until((tmp_path / "ready").exists, WAIT_S)
    ports = listening(job.pids())
    assert len(ports) >= 4, ports
    assert {address for bound in ports.values() for address in bound} <= {"127.0.0.1", "::1"}, (
        "nothing listens for other hosts"
    )
    for store in torchs_stores(job.out_dir, job.pids()):
        del ports[store]
    floods.append(Flood(sorted(ports), 300))
    wait_until(
        lambda: floods[0].calls > 300 * len(ports) + 100, WAIT_S
    )  # all have called, and some for the second time
    used = {pid: psutil.Process(pid).memory_info().rss for pid in job.pids()}
    (tmp_path / "strike").touch()
    ran = job.finish(WAIT_S)
    floods[0].end()
    assert ran.exit_code == 0, ran
    assert len(re.findall("lost", ran.stderr)) == 1, ran
    assert max(used.values()) < 1 << 30, used
    for name in ("ready", "strike"):
        (tmp_path / name).unlink()
    assert digest(start_rackrun(arguments).finish(WAIT_S)) == digest(ran)


def test_a_job_over_ipv6(start_rackrun: Callable[..., Any], tmp_path: Path, script: str) -> None:
    """Two launchers; a rank is lost, and a spare of the other tray takes it over."""
    from tests.launcher.test_bad_input import _free_port

    token = tmp_path / "job.token"
    token.write_text("a-secret-of-more-than-16-characters")
    token.chmod(0o600)
    meet = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--spares",
        "1",
        "--rdzv-endpoint",
        f"[::1]:{_free_port()}",
        "--rdzv-id",
        "six",
    ]
    jobs = []
    for node_rank in ("0", "1"):
        jobs.append(start_rackrun([*meet, "--token-file", token, "--node-rank", node_rank, script]))
        if node_rank == "0":
            wait_until((jobs[0].out_dir / "endpoint.json").exists, WAIT_S)
    wait_until((tmp_path / "ready").exists, WAIT_S)
    bound = {address for job in jobs for addresses in listening(job.pids()).values() for address in addresses}
    assert bound == {"::1"}
    assert jobs[0].status  # by the URL of endpoint.json
    status = subprocess.run(
        [sys.executable, "-m", "rackrun.ctl", "status", str(jobs[0].out_dir)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert status.returncode == 0, status.stderr
    (tmp_path / "strike").touch()
    ran = [job.finish(WAIT_S) for job in jobs]
    assert [one.exit_code for one in ran] == [0, 0], f"{ran[0]}\n{ran[1]}"
    assert "lost" in ran[0].stderr, ran[0]


def started_by_shell(arguments: list[str], script: str, tmp_path: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rackrun", "--out-dir", str(tmp_path / "out"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        ["sh", "-c", script, "sh", *command], cwd=tmp_path, env=env, start_new_session=True, **options
    )


def test_with_closed_streams_a_fork_server_that_is_lost_is_replaced(tmp_path: Path, script: str) -> None:
    job = started_by_shell(["--standalone", "--nproc-per-node", "1", "plain.py"], 'exec "$@" 0<&- 1>&- 2>&-', tmp_path)
    try:
        wait_until((tmp_path / "up-0-0").exists, WAIT_S)
        wait_until((tmp_path / "up-0-0").read_text, WAIT_S)
        os.kill(int((tmp_path / "up-0-0").read_text()), signal.SIGKILL)  # its parent, the fork server
        wait_until((tmp_path / "up-1-0").exists, WAIT_S)
        (tmp_path / "go").touch()
        assert job.wait(WAIT_S) == 0
    finally:
        job.kill()
        job.wait()


def test_when_nobody_reads_its_output_any_more_a_job_goes_on(tmp_path: Path, script: str) -> None:
    reading, writing = os.pipe()
    job = started_by_shell(
        ["--standalone", "--nproc-per-node", "1", "plain.py"], 'exec "$@"', tmp_path, stdout=writing, stderr=writing
    )
    os.close(writing)
    try:
        wait_until((tmp_path / "up-0-0").exists, WAIT_S)
        wait_until((tmp_path / "up-0-0").read_text, WAIT_S)
        os.close(reading)
        os.kill(int((tmp_path / "up-0-0").read_text()), signal.SIGKILL)
        wait_until((tmp_path / "up-1-0").exists, WAIT_S)
        (tmp_path / "go").touch()
        assert job.wait(WAIT_S) == 0
    finally:
        job.kill()
        job.wait()


def test_under_nohup_a_hangup_ends_nothing(tmp_path: Path, script: str) -> None:
    job = started_by_shell(["--standalone", "--nproc-per-node", "1", "plain.py"], 'trap "" HUP; exec "$@"', tmp_path)
    try:
        wait_until((tmp_path / "up-0-0").exists, WAIT_S)
        os.kill(job.pid, signal.SIGHUP)
        (tmp_path / "go").touch()
        assert job.wait(WAIT_S) == 0
    finally:
        job.kill()
        job.wait()


RAISES = """
class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no")
import sys
what = sys.argv[1]
if what == "surrogate":
    raise ValueError("\\ud800 of mine")
if what == "endless":
    raise ValueError("x" * 100_000_000)
raise Broken
"""


@pytest.mark.parametrize(("what", "told"), [("surrogate", "\\ud800 of mine"), ("endless", "xxx"), ("broken", "Broken")])
def test_any_exception_ends_with_its_own_reason(
    run_rackrun: Callable[..., Any], tmp_path: Path, what: str, told: str
) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    ran = run_rackrun(["--standalone", "--nproc-per-node", "1", "--max-restarts", "0", "raises.py", what])
    assert ran.exit_code == 1, ran.stderr[-3000:]
    said = ran.stderr[ran.stderr.index("rackrun: the script failed") :]
    assert told in said
    assert len(said) < 100_000


HEAD = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import rackrun

@rackrun.elastic(global_batch_size=8, micro_batch_size=2)
def main(run):
    torch.manual_seed(1)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader([torch.full((4,), n / 64) for n in range(64)])

    @run.step
    def train(step):
        for x in loader:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(12):
        if number == 8 and os.environ.get("WAITS"):
            Path(f"ready-{run.rank}").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        Path(f"began-{run.rank}-{number}").open("a").write("x")
        train(number)
    if run.rank == 0:
        print("digest", torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes().hex(), flush=True)
main()
"""


def test_the_head_alone_is_started_again(start_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    """Its launcher is killed, and with it the coordinator and its ranks. The other host's launcher stays as it is: the head's command, given
    once more, is enough, and all go on from the newest checkpoint."""
    from tests.launcher.test_bad_input import _free_port

    (tmp_path / "head.py").write_text(HEAD)
    token = tmp_path / "job.token"
    token.write_text("a-secret-of-more-than-16-characters")
    token.chmod(0o600)
    common = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        f"127.0.0.1:{_free_port()}",
        "--rdzv-id",
        "heads",
    ]
    common += ["--token-file", str(token), "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "3"]

    def start(node_rank: str) -> Any:
        return start_rackrun([*common, "--node-rank", node_rank, "head.py"], env={"WAITS": "1"})

    head = start("0")
    wait_until((head.out_dir / "endpoint.json").exists, WAIT_S)
    other = start("1")
    wait_until(lambda: (tmp_path / "ready-0").exists() and (tmp_path / "ready-1").exists(), WAIT_S)
    head.process.kill()
    assert head.finish(WAIT_S).exit_code == -signal.SIGKILL
    (tmp_path / "go").touch()
    again = start("0")
    ran = [again.finish(2 * WAIT_S), other.finish(WAIT_S)]
    assert [one.exit_code for one in ran] == [0, 0], f"{ran[0]}\n{ran[1]}"
    assert len((tmp_path / "began-0-2").read_text()) == 1, "what a checkpoint holds is not done again"
    (tmp_path / "checkpoints").rename(tmp_path / "old")
    alone = start_rackrun(["--standalone", "--nproc-per-node", "2", "head.py"]).finish(WAIT_S)
    assert digest(alone) == digest(ran[0])
