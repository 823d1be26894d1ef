"""A small training in a world whose size a test decides: it ends ranks, lets others come, and says how far they may go.

resized.py MODE STEPS FOLDER REDUCTION [BATCH]: BATCH is ``constant`` or ``scale_lr``; ``RACKRUN_TEST_WORLDS`` (JSON): it is told that the world
was of these sizes, whatever it is. MODE is ``ddp``, ``fsdp``, ``hsdp`` (--mesh dp_replicate=,dp_shard=) or ``tp`` (--mesh
dp=,tp=: FSDP2 over dp). ``FOLDER/limit`` holds the step that may be begun next at the most; ``FOLDER/pid/SLOT`` the process in each
slot; whoever finds ``FOLDER/hangs/SLOT`` hangs when it enters ``main`` again; ``FOLDER/come/SLOT`` lets whoever waits there go on to run.steps(). As its last act each rank writes a hash of its weights to
``FOLDER/held/RANK``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun
from rackrun.protocol.boot import current
from rackrun.worker.steps import unit_times

MODE, STEPS, FOLDER, REDUCTION = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
BATCH = sys.argv[5] if len(sys.argv) > 5 else "constant"
WORLDS = json.loads(os.environ.get("RACKRUN_TEST_WORLDS", "null"))
WIDTH = 24


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(WIDTH)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def hang_if_told(slot: str) -> None:
    """Once it enters ``main`` again. Its own patience with itself is short then: nobody else's."""
    if not (FOLDER / "hangs" / slot).exists():
        return
    if unit_times._FACTOR:
        unit_times._FACTOR = unit_times._BUSY_FACTOR = 0.0
        unit_times.ENTERS_AGAIN = unit_times.Allowance(300, 300)
        return
    (FOLDER / "hangs" / slot).unlink()
    wait_for(lambda: False)


def net() -> nn.Sequential:
    if MODE == "tp":  # all that has weights is split over tp
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    return nn.Sequential(
        nn.Linear(WIDTH, 64),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, WIDTH),
    )


def sharded(layers: nn.Sequential, run: rackrun.Run) -> nn.Module:
    mesh = None
    if MODE == "tp":
        parallelize_module(layers, run.mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        mesh = run.mesh["dp"]
    elif MODE == "hsdp":
        mesh = run.mesh
    for layer in layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


@rackrun.elastic(global_batch_size=32, micro_batch_size=2, seed=3, reduction=REDUCTION, batch=BATCH)  # type: ignore[arg-type]
def main(run: rackrun.Run) -> None:
    if WORLDS is not None:
        run._batches._worlds = lambda: WORLDS
    boot = current()
    slot = boot.slot.replace("/", "-") if boot is not None else "alone"
    (FOLDER / "pid" / f"{slot}.new").write_text(str(os.getpid()))
    (FOLDER / "pid" / f"{slot}.new").rename(FOLDER / "pid" / slot)
    hang_if_told(slot)
    layers = net()
    model = DDP(layers, bucket_cap_mb=0.01) if MODE == "ddp" else sharded(layers, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> None:
        for batch in data:
            step.backward((model(batch) - batch.sin().cumsum(1)).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    def export() -> None:
        digest = hashlib.sha256()
        for parameter in layers.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().numpy().tobytes())
        (FOLDER / "held" / str(run.rank)).write_text(digest.hexdigest())

    run.at_end(export)
    if boot is not None and boot.spare and not (FOLDER / "came" / slot).exists():
        wait_for((FOLDER / "come" / slot).exists)
        (FOLDER / "come" / slot).rename(FOLDER / "came" / slot)
    for step in run.steps(STEPS):
        wait_for(lambda step=step: step <= int((FOLDER / "limit").read_text() or 0))  # type: ignore[misc]
        train_step(step)


if __name__ == "__main__":
    main()
