"""small.py WRAP REDUCTION [STEPS [OUT]]: a training of a second or two, for campaigns of many runs with faults.

    rackctl chaos campaign --seeds 0:20 --tally tally.jsonl -- examples/chaos/small.py {wrap} {reduction} 40 {out}

WRAP is ``ddp`` or ``fsdp``, REDUCTION ``fast`` or ``exact``. With OUT, the folder of the run, nobody goes beyond the last but one step before all that was
begun has taken effect, for half a minute at the most: some faults take longer than the training. What a recovery may lose matters here: weights, moments, a schedule, dropout, augmentation.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

WRAP, REDUCTION, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 40
HISTORY = Path(sys.argv[4]).parent / "history.jsonl" if len(sys.argv) > 4 else None
PATIENCE_S = 30.0
WIDTH = 18
STEP_S = 0.04
"""Steps are seen by asking, every 20 ms."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points whose augmentation is random."""

    def __init__(self) -> None:
        self.x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.x[index].sin()


def wait_for_faults() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while HISTORY is not None and HISTORY.exists() and time.monotonic() < deadline:
        text = HISTORY.read_text()
        if text.count('"what":"begun"') <= text.count('"what":"confirmed"'):
            break
        time.sleep(0.02)


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=3, snapshot_every=2, reduction=REDUCTION)  # type: ignore[arg-type]
def main(run: rackrun.Run) -> None:
    blocks = nn.Sequential(nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.Linear(24, WIDTH))
    model: nn.Module = blocks
    if WRAP == "fsdp":
        fully_shard(blocks)
    else:
        model = DDP(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = run.loader(Noisy())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return step.loss

    for step in run.steps(STEPS):
        time.sleep(STEP_S)
        if step == STEPS - 2:
            wait_for_faults()
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
