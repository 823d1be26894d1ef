"""A tiny training in which everything that a recovery may lose matters: weights, moments, schedule, dropout, augmentation.

train.py MODE STEPS FOLDER: MODE is ``ddp``, ``fsdp`` or ``hsdp``, two replicas of two shards. Each rank writes, as its last act, what it holds to FOLDER/RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from strike import Striker  # type: ignore[import-not-found]  # it lies beside this script
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

MODE, STEPS, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
REDUCTION = os.environ.get("RACKRUN_TEST_REDUCTION", "fast")
PATIENCE_S = float(os.environ.get("RACKRUN_TEST_PATIENCE", "0"))
"""How long a step may take without being called a hang; 0: as rackrun finds."""
MESH = {"replicate": 2, "shard": 2} if MODE == "hsdp" else None
WIDTH = 18  # over four ranks: shards of different sizes


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points whose augmentation is random."""

    def __init__(self, size: int = 640) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = self.x.sin().cumsum(dim=1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.drop(self.down(self.up(self.norm(x)).relu()))
        return x + added


@rackrun.elastic(
    global_batch_size=16,
    micro_batch_size=2,
    seed=11,
    snapshot_every=2,
    reduction=REDUCTION,  # type: ignore[arg-type]
    mesh=MESH,
)
def main(run: rackrun.Run) -> None:
    strike = Striker(run)
    blocks = nn.Sequential(*(Block() for _ in range(3)))

    def middle_of_backward(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: strike.here("backward"))

    blocks[1].register_forward_hook(middle_of_backward)
    blocks[2].register_forward_pre_hook(lambda *_: strike.here("forward"))
    model: nn.Module = blocks
    if MODE != "ddp":
        for block in blocks:
            fully_shard(block, mesh=run.mesh if MESH else None)
        fully_shard(blocks, mesh=run.mesh if MESH else None)
    else:
        model = DDP(blocks, bucket_cap_mb=0.005)  # several buckets
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    optimizer.register_step_pre_hook(lambda *_: strike.here("before the update"))
    optimizer.register_step_post_hook(lambda *_: strike.here("after the update"))
    data = run.loader(Noisy())

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(nn.functional.mse_loss(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        strike.here("before the gate")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        strike.here("end of the step")
        return step.loss

    def evaluate() -> None:
        strike.here("evaluation")
        model.eval()
        with torch.no_grad():
            error = (model(torch.linspace(-1, 1, WIDTH).expand(4, WIDTH) * (run.rank + 1))).square().mean()
        model.train()
        dist.all_reduce(error)
        strike.here("evaluation reduced")
        run.log(error=error.item())

    def export() -> None:
        strike.here("at the end")
        hashes: list[str | None] = [None] * run.world_size
        dist.all_gather_object(hashes, held(run))
        strike.here("exported")
        if run.is_main:
            (FOLDER / "export.json").write_text(json.dumps(hashes))

    run.every(4, evaluate)
    run.at_end(export)
    for step in run.steps(STEPS):
        strike.here("between steps")
        if PATIENCE_S:
            run.expect(PATIENCE_S)
        run.log(loss=train_step(step))
    strike.here("after the loop")
    held.run = run  # type: ignore[attr-defined]


def held(run: rackrun.Run) -> str:
    """A hash of all that this rank trains, bit for bit."""
    digest = hashlib.sha256(run._state.encode_plain())
    for path, tensor in sorted(run._state.tensors().items()):
        digest.update(path.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
    run = held.run  # type: ignore[attr-defined]
    (FOLDER / f"{run.rank}.json").write_text(json.dumps(held(run)))
