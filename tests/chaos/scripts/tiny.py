"""tiny.py STEPS HOLD OUT STRIKES [ddp|fsdp]: a training of STEPS steps. In a run with faults everybody stands before step HOLD until STRIKES have
begun, or (``1!``) are confirmed; there may be several of both (``6,9``, ``1,3``), and TINY_STRIKES is instead of STRIKES. TINY_UNTIL: and until
the coordinator has given a command of this name. TINY_PACE: seconds that each step takes at the least from the first of them on. TINY_INSIDE:
they stand in step HOLD, not before it: whoever is lost there, it is done again."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

STEPS, OUT, MODE = int(sys.argv[1]), Path(sys.argv[3]), "".join(sys.argv[5:])
STRIKES, UNTIL = os.environ.get("TINY_STRIKES", sys.argv[4]), os.environ.get("TINY_UNTIL")
HOLDS = dict(zip(map(int, sys.argv[2].split(",")), STRIKES.split(","), strict=True))
PACE_S, INSIDE = float(os.environ.get("TINY_PACE", "0")), "TINY_INSIDE" in os.environ
WIDTH = 8


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.x[index].sin()


def hold(strikes: str) -> None:
    history, what, count = (
        OUT.parent / "history.jsonl",
        '"confirmed"' if "!" in strikes else '"begun"',
        int(strikes.rstrip("!")),
    )
    while OUT.name == "faulted" and (history.read_text().count(what) < count or (UNTIL and not commanded(UNTIL))):
        time.sleep(0.01)


def commanded(name: str) -> bool:
    with closing(sqlite3.connect(OUT / "run" / "journal.sqlite", timeout=5.0)) as journal:
        query = "SELECT count(*) FROM events WHERE kind = 'command' AND name = ?"
        return bool(journal.execute(query, (name,)).fetchone()[0])


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3, snapshot_every=1 if MODE == "fsdp" else None)
def main(run: rackrun.Run) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH))
    model: nn.Module = layers
    if MODE == "fsdp":
        fully_shard(layers)
    else:
        model = DDP(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        if INSIDE and int(step) in HOLDS:
            hold(HOLDS[int(step)])
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        if step in HOLDS and not INSIDE:
            hold(HOLDS[int(step)])
        if OUT.name == "faulted" and step >= min(HOLDS):
            time.sleep(PACE_S)
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
