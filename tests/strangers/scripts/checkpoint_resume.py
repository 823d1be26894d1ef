"""CheckpointManager under a plain torchrun-like job: the workers are started again, and go on where the last save was."""
# strangers: plain=yes

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.checkpoint import CheckpointManager, MemoryTier

STEPS = 30


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    # Else DDP lays its buckets out anew after the first backward of every start, and adds in another order in that one than in a run that goes on.
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    progress = {"step": 0}
    folder = os.path.join(os.path.dirname(sys.argv[1]), "checkpoints")
    with CheckpointManager(folder, memory=MemoryTier("/dev/shm"), durable_every=10) as checkpoints:
        checkpoints.prepare({"model": model, "optim": optimizer, "scheduler": scheduler, "progress": progress})
        checkpoints.restore()
        while progress["step"] < STEPS:
            step = progress["step"]
            g = torch.Generator().manual_seed(step * world + rank)
            x, y = torch.randn(8, 16, generator=g), torch.randint(4, (8,), generator=g)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["step"] += 1
            checkpoints.save(progress["step"])
            record.step(rank, step, own={"loss": loss.item()})
        checkpoints.wait_until_finished()
    record.end(rank, model=model.module, optimizer=optimizer, scheduler=scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
