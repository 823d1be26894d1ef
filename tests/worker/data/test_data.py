"""The global batch: which samples, in which shard, on which rank, and which random numbers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.errors import UsageError
from rackrun.worker.batch.batch_runs import place
from rackrun.worker.data.loader import BatchPlan, Shard
from rackrun.worker.data.rng import derive, reseed
from tests.worker import harness  # noqa: F401 - sets the number of threads before torch is imported

GOLDEN_SEED = 1449691467326812477
GOLDEN_ORDER = [11, 10, 0, 1, 7, 3, 4, 2, 8, 6, 5, 9]


def permutation(samples: int, seed: int = 3) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(derive(seed, "epoch", 0))).permutation(samples).astype(np.int64)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_share_the_shards_evenly_and_completely(ranks: int) -> None:
    shares = [BatchPlan(16, 2, 0).shards_of(rank, ranks) for rank in range(ranks)]
    assert [shard.index for share in shares for shard in share if not shard.ghost] == list(range(8))
    assert len({len(share) for share in shares}) == 1
    assert all(share[0].ghost is False for share in shares)


def test_ghosts_stand_last_and_repeat_the_ranks_own_last_shard() -> None:
    assert BatchPlan(16, 2, 0).shards_of(0, 3) == [Shard(0), Shard(1), Shard(1, ghost=True)]


@pytest.mark.parametrize(("samples", "batch", "micro"), [(64, 16, 2), (67, 16, 4), (16, 16, 16)])
def test_the_steps_of_an_epoch_deliver_its_samples_exactly_once(samples: int, batch: int, micro: int) -> None:
    plan = BatchPlan(batch, micro, 3)
    order = permutation(samples)
    steps = plan.steps_per_epoch(samples)
    seen = [
        i
        for step in range(steps)
        for shard in range(plan.shards)
        for i in plan.ids(place(((0, plan.shards),), step, samples, micro), shard, lambda _: order)
    ]
    assert seen == order[: steps * batch].tolist()
    assert len(set(seen)) == len(seen)


def test_the_next_epoch_follows_with_its_own_order() -> None:
    plan = BatchPlan(8, 4, 0)
    asked: list[int] = []

    def order(epoch: int) -> Any:
        asked.append(epoch)
        return np.arange(20)

    for step in range(6):
        plan.ids(place(((0, 2),), step, 20, 4), 1, order)
    assert asked == [0, 0, 1, 1, 2, 2]


def test_seeds_and_orders_are_the_same_on_every_machine() -> None:
    assert derive(7, "unit", 3, 0, 1) == GOLDEN_SEED
    assert permutation(12).tolist() == GOLDEN_ORDER


def test_all_generators_are_seeded() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002 - what scripts use

    reseed(1, "shard", 2, 3)
    first = draw()
    assert draw() != first
    reseed(1, "shard", 2, 3)
    assert draw() == first
    reseed(1, "shard", 2, 4)
    assert draw() != first


@pytest.mark.parametrize(("batch", "micro"), [(10, 4), (0, 1), (4, 0), (4, 8)])
def test_sizes_that_do_not_divide_are_refused(batch: int, micro: int) -> None:
    with pytest.raises(UsageError, match="multiple"):
        BatchPlan(batch, micro, 0)


def test_more_ranks_than_micro_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="some would have none"):
        BatchPlan(8, 4, 0).shards_of(0, 3)


def test_a_data_set_smaller_than_the_global_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="fewer than one global batch"):
        BatchPlan(8, 4, 0).steps_per_epoch(7)


LOADS = """
import sys, tempfile, os
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from rackrun.worker.torch_compat.dataloader_workers import end_workers, leave_no_folders
leave_no_folders()
stream = iter(DataLoader([torch.ones(3) for _ in range(64)], num_workers=2, batch_size=2))
assert next(stream).sum() == 6
assert next(stream).sum() == 6
print([path.name for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("pymp")], flush=True)
end_workers(stream)
os._exit(0)
"""


def test_loader_processes_leave_no_folders_however_they_end(tmp_path: Path) -> None:
    """Tensors have come over their sockets; neither they nor their parent come to Python's own end."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    ran = subprocess.run([sys.executable, "-c", LOADS], env=env, capture_output=True, text=True, timeout=110)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("pymp")]
