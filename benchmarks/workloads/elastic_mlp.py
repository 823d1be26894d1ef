"""The workload under rackrun."""

from __future__ import annotations

import os
import time

import torch
from common import SEED, Marks, Noise, ResidualMLP, arguments, loss_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import rackrun

BATCH = int(os.environ.get("BENCH_BATCH", "4"))
"""Of a micro-batch."""
MICRO_BATCHES = int(os.environ.get("BENCH_MICRO_BATCHES", "1"))
"""Of each rank."""
RANKS = int(os.environ.get("BENCH_RANKS", "4"))
REDUCTION = os.environ.get("BENCH_REDUCTION", "fast")
PAUSE_S = float(os.environ.get("BENCH_PAUSE_S", "0"))
"""After each step: processors are idle then, as beside GPUs."""
SNAPSHOT_EVERY = os.environ.get("BENCH_SNAPSHOT_EVERY")
BLOCKS = [int(steps) or None for steps in os.environ.get("BENCH_SNAPSHOT_BLOCKS", "").split()]
"""Steps from one snapshot to the next in blocks of BENCH_BLOCK_STEPS, in turn; 0 is the automatic interval."""
BLOCK_STEPS = int(os.environ.get("BENCH_BLOCK_STEPS", "1"))


@rackrun.elastic(
    global_batch_size=BATCH * MICRO_BATCHES * RANKS,
    micro_batch_size=BATCH,
    seed=SEED,
    snapshot_every=int(SNAPSHOT_EVERY) if SNAPSHOT_EVERY else None,
    reduction=REDUCTION,  # type: ignore[arg-type]
)
def main(run: rackrun.Run) -> None:
    args = arguments()
    torch.manual_seed(SEED)
    model: nn.Module = ResidualMLP(args.width, args.layers).to(run.device)
    if os.environ.get("BENCH_SHARDED"):
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DDP(model)
    fused = REDUCTION == "fast" or not os.environ.get("BENCH_SHARDED")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Noise(args.width))
    marks = Marks(args.marks)

    @run.step
    def train_step(step: rackrun.Step) -> None:
        for batch in data:
            loss = loss_of(model, batch)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # Here it is committed. Where the ranks are to get other shards, the call does not return: main is entered again.
        marks.write(rank=run.rank, step=int(step), loss=loss.item(), attempt=step.attempt)

    for step in run.steps(args.steps):
        if BLOCKS:
            run._units._snapshots._every = BLOCKS[int(step) // BLOCK_STEPS % len(BLOCKS)]
        train_step(step)
        if PAUSE_S:
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
