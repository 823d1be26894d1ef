"""`CheckpointManager` under plain torchrun: real processes, real signals, gloo, DDP and FSDP2."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from rackrun.protocol import crash_points
from tests.checkpoint import manager_job
from tests.checkpoint.manager.test_manager import flip

ROOT = Path(__file__).resolve().parents[3]
JOB = Path(__file__).parents[1] / "manager_job.py"
STEPS = 6


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def torchrun(folder: Path, shm: Path, ranks: int, kind: str, steps: int = STEPS, **options: Any) -> str:
    """Run to its end; what it wrote to stderr."""
    folder.mkdir(exist_ok=True)
    # torch 2.13 keeps one store through restarts, in which gloo meets the addresses of the dead
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         "--max-restarts", "1", "--monitor-interval", "0.1", str(JOB), str(folder), str(shm), kind, str(steps),
         json.dumps(options)],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=110)
    finally:
        for pid in _family(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said
    return said


def _family(leader: int) -> list[int]:
    """torchrun's workers lead sessions of their own: its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(leader).children(recursive=True)] + [leader]
    return []


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def states(folder: Path, ranks: int) -> dict[int, str]:
    """Step -> digest of the state, the same on all ranks, in all lives."""
    found: dict[int, str] = {}
    for rank in range(ranks):
        for line in lines(folder, rank):
            if "step" in line:
                assert found.setdefault(line["step"], line["state"]) == line["state"], f"rank {rank}, {line}"
    return found


def restored(folder: Path, ranks: int) -> dict[str, Any]:
    """What all ranks said of the last restore, alike."""
    said = [[line for line in lines(folder, rank) if "restored" in line][-1] for rank in range(ranks)]
    assert all(one == said[0] for one in said), said
    return said[0]


POINTS = [
    name
    for name in crash_points.CRASH_POINTS
    if name.startswith(("arena.begin.", "arena.seal.", "arena.commit.", "durable."))
]


def forked(folder: Path, shm: Path, ranks: int, kind: str, steps: int = STEPS, **options: Any) -> str:
    """The same without torchrun: ranks as forks of this process, which has torch already. What they wrote to stderr."""
    folder.mkdir(exist_ok=True)
    told, tell = os.pipe()  # the port; a store has threads, whose locks a fork would inherit
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                fd = os.open(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(fd, 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                try:
                    os.close(tell)
                    store = dist.TCPStore("127.0.0.1", int.from_bytes(os.read(told, 4)), is_master=False)
                    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
                    manager_job.train(folder, shm, kind, steps, options)
                    dist.destroy_process_group()
                    code = 0
                except BaseException:  # noqa: BLE001 - whatever it is, this fork ends here
                    traceback.print_exc()
            os._exit(code)
        children.append(pid)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    os.write(tell, server.port.to_bytes(4) * ranks)
    os.close(tell)
    os.close(told)
    if "die" in options:  # as torchrun does: the others are ended when one is dead
        victim = int(options["die"].partition(":")[0])
        children.insert(0, children.pop(victim))
        ended = os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_status == signal.SIGKILL:
            for pid in children[1:]:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)
            return ""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    said = (folder / "stderr.txt").read_text()
    assert codes == [0] * ranks, said
    return said


@pytest.mark.parametrize(
    ("kind", "ranks", "die", "committed"),
    [
        pytest.param("fsdp", 3, "1:4:arena.seal.digested", 3, marks=pytest.mark.soak),
        pytest.param("ddp", 2, "0:4:arena.commit.one_copy", 4, marks=pytest.mark.stories),
    ],
    ids=["FSDP2, before it has sealed", "DDP, rank 0 between commit and its mark"],
)
def test_a_worker_killed_in_the_middle_of_a_save_is_started_again_and_the_run_is_the_one_without_a_fault(
    tmp_path: Path, shm: Path, kind: str, ranks: int, die: str, committed: int
) -> None:
    torchrun(tmp_path / "hurt", shm, ranks, kind, die=die)
    assert (tmp_path / "hurt" / "died").exists()
    last = restored(tmp_path / "hurt", ranks)
    assert (last["restored"], last["life"], last["tiers"]) == (committed, "1", ["own_tray"])
    for rank in range(ranks):
        end = lines(tmp_path / "hurt", rank)[-1]
        assert (end["finished"], end["latest"][1], end["failed"]) == (STEPS, STEPS, 0)
    assert list(shm.glob("rackrun-*/*/*")) == [], "a clean end leaves no memory behind"

    forked(tmp_path / "calm", shm, ranks, kind)
    assert states(tmp_path / "hurt", ranks) == states(tmp_path / "calm", ranks)
    assert last["state"] == states(tmp_path / "calm", ranks)[committed]


def test_another_number_of_ranks_goes_on_from_disk_and_from_memory(tmp_path: Path, shm: Path) -> None:
    forked(tmp_path, shm, 3, "fsdp", 4, durable_every=4)
    saved = states(tmp_path, 3)[4]
    forked(tmp_path, shm, 2, "fsdp", 4, keep=True)
    last = restored(tmp_path, 2)
    assert (last["restored"], last["tiers"], last["state"]) == (4, ["shared"], saved)

    forked(tmp_path / "memory", shm, 3, "fsdp", 3, keep=True)
    forked(tmp_path / "memory", shm, 2, "ddp", 4, keep=True)
    last = restored(tmp_path / "memory", 2)
    assert (last["restored"], last["tiers"], last["state"]) == (3, ["own_tray"], states(tmp_path / "memory", 3)[3])
    arenas = [path.name[:19] for path in sorted(shm.glob("rackrun-*/*/*.arena"))]
    assert arenas == ["rank-00000-of-00002", "rank-00001-of-00002"], "the other world's went with the first commit"


def test_a_flipped_byte_in_one_arena_takes_all_ranks_to_the_older_checkpoint(tmp_path: Path, shm: Path) -> None:
    forked(tmp_path, shm, 2, "fsdp", 4, keep=True)
    (arena,) = shm.glob("rackrun-*/*/rank-00001-*.arena")
    flip(arena, 4)
    said = forked(tmp_path, shm, 2, "fsdp", 5)
    last = restored(tmp_path, 2)
    assert (last["restored"], last["passed"], last["tiers"]) == (3, 1, ["own_tray"])
    assert last["state"] == states(tmp_path, 2)[3]
    assert "is not what was sealed" in said


def test_ranks_that_save_different_steps_commit_nothing(tmp_path: Path, shm: Path) -> None:
    said = forked(tmp_path, shm, 2, "ddp", 2, skew=1)
    assert "rank 1 has saved step 11, rank 0 step 1" in said
    assert all(lines(tmp_path, rank)[-1]["latest"] is None for rank in range(2))


def crash_and_go_on(folder: Path, shm: Path, seed: int) -> None:
    """One rank is killed at a random edge of a save, a commit, a flush or a collection; the job goes on from what it left."""
    chance = random.Random(seed)
    kind = chance.choice(["ddp", "fsdp"])
    point = chance.choice(POINTS)
    on_disk = point.startswith("durable.")  # rank 0 finishes; a second one may be passed over
    die = f"{0 if on_disk else chance.randrange(2)}:{1 if on_disk else chance.randint(1, STEPS)}:{point}"
    forked(folder, shm, 2, kind, durable_every=2, die=die)
    committed = max(
        (line["committed"] for rank in range(2) for line in lines(folder, rank) if "step" in line), default=0
    )
    assert (folder / "died").exists(), die
    forked(folder, shm, 2, kind, durable_every=2)
    reached = [[line["restored"] for line in lines(folder, rank) if "restored" in line] for rank in range(2)]
    assert reached[0] == reached[1], die
    assert (reached[0] or [0])[-1] >= committed, f"{die}: older than the last commit"
    seen = states(folder, 2)
    for rank in range(2):
        assert lines(folder, rank)[-1]["finished"] == STEPS, die
        assert all(
            seen[line["restored"]] == line["state"] for line in lines(folder, rank) if line.get("restored") in seen
        )


@pytest.mark.parametrize("seed", range(1))
def test_wherever_a_rank_dies_the_job_goes_on_from_its_last_commit(tmp_path: Path, shm: Path, seed: int) -> None:
    crash_and_go_on(tmp_path, shm, seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_wherever_a_rank_dies_the_job_goes_on_from_its_last_commit_in_many_places(tmp_path: Path, shm: Path) -> None:
    for seed in range(int(os.environ.get("RACKRUN_SOAK_SEEDS", "20"))):
        crash_and_go_on(tmp_path / str(seed), shm, 1000 + seed)
