"""stored.py STEPS OUT MODE: a training of STEPS steps, MODE ``ddp`` or ``fsdp``, whose state is kept in places that fail.

STORED_HOLDS is ``STEP:COUNT[:NUMBER],...``: in a run with faults everybody stands before that step until so many strikes have begun or been
taken back, nothing is being written here, and, if it is given, until there is that checkpoint. STORED_STRUCK is ``STEP``: before that step they stand until
a strike is known to have struck.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

STEPS, OUT, MODE = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
HOLDS = {
    int(step): [int(number) for number in rest]
    for step, *rest in (one.split(":") for one in os.environ.get("STORED_HOLDS", "").split(",") if one)
}
STRUCK = int(os.environ.get("STORED_STRUCK") or -1)
WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.x[index].sin()


HISTORY = OUT.parent / "history.jsonl"


def hold(count: int, number: int | None = None) -> None:
    there = OUT / "checkpoints" / "run" / f"gen-{number:012}" if number is not None else OUT

    def may_go_on() -> bool:
        told = HISTORY.read_text()
        writing = any(thread.name.startswith("rackrun-checkpoint") for thread in threading.enumerate())
        return told.count('"begun"') + told.count('"taken back"') >= count and there.exists() and not writing

    while OUT.name == "faulted" and not may_go_on():
        time.sleep(0.01)


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3, snapshot_every=2)
def main(run: rackrun.Run) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.2), nn.Linear(64, WIDTH))
    model: nn.Module = layers
    if MODE == "fsdp":
        for layer in layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
    if MODE == "ddp":
        model = DDP(layers)
    else:
        fully_shard(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        while step == STRUCK and OUT.name == "faulted" and '"confirmed"' not in HISTORY.read_text():
            time.sleep(0.01)
        if step in HOLDS:
            hold(*HOLDS[step])
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
