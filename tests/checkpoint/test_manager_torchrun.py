"""`CheckpointManager` under plain torchrun: real processes, real signals, gloo, DDP and FSDP2."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoint.test_manager import flip

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("manager_job.py")
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
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_family=True,
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


@pytest.mark.parametrize(
    ("kind", "ranks", "die"),
    [("fsdp", 3, "1:4:arena.seal.digested"), ("ddp", 2, "0:4:arena.commit.one_copy")],
    ids=["FSDP2, between copy and seal", "DDP, rank 0 between commit and its mark"],
)
def test_a_worker_killed_in_the_middle_of_a_save_is_started_again_and_goes_on_bit_for_bit(
    tmp_path: Path, shm: Path, kind: str, ranks: int, die: str
) -> None:
    torchrun(tmp_path, shm, ranks, kind, die=die)
    last = restored(tmp_path, ranks)
    assert (tmp_path / "died").exists()
    assert last["life"] == "1"
    assert last["tiers"] == ["own_tray"]
    assert last["restored"] == (3 if kind == "fsdp" else 4), "the newest that was committed"
    assert last["state"] == states(tmp_path, ranks)[last["restored"]]
    assert all(lines(tmp_path, rank)[-1]["committed"] for rank in range(ranks))
    assert list(shm.glob("rackrun-*/*/*")) == [], "a clean end leaves no memory behind"


def test_it_is_the_run_without_a_fault(tmp_path: Path, shm: Path) -> None:
    torchrun(tmp_path / "calm", shm, 2, "fsdp")
    torchrun(tmp_path / "hurt", shm, 2, "fsdp", die="0:3:arena.begin.both_copies")
    assert states(tmp_path / "hurt", 2) == states(tmp_path / "calm", 2)


def test_another_number_of_ranks_goes_on_from_disk_and_from_memory(tmp_path: Path, shm: Path) -> None:
    torchrun(tmp_path, shm, 3, "fsdp", 4, durable_every=4)
    torchrun(tmp_path, shm, 2, "fsdp", 6, keep=True)
    assert restored(tmp_path, 2)["tiers"] == ["shared"]
    assert restored(tmp_path, 2)["restored"] == 4
    assert restored(tmp_path, 2)["state"] == states(tmp_path, 3)[4]
    torchrun(tmp_path, shm, 1, "ddp", 6)
    assert restored(tmp_path, 1)["tiers"] == ["own_tray"]
    assert restored(tmp_path, 1)["state"] == lines(tmp_path, 1)[-2]["state"]


def test_a_flipped_byte_in_one_arena_takes_all_ranks_to_the_older_generation(tmp_path: Path, shm: Path) -> None:
    torchrun(tmp_path, shm, 2, "fsdp", 4, keep=True)
    (arena,) = shm.glob("rackrun-*/*/rank-00001-*.arena")
    flip(arena, 4)
    said = torchrun(tmp_path, shm, 2, "fsdp", 5)
    last = restored(tmp_path, 2)
    assert (last["restored"], last["passed"], last["tiers"]) == (3, 1, ["own_tray"])
    assert last["state"] == states(tmp_path, 2)[3]
    assert "is not what was sealed" in said
