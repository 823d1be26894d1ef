"""The same workload as people write it for torchrun: plain DDP, a checkpoint on disk every few steps, and a resume."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import SEED, Marks, Noise, ResidualMLP, arguments, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import default_collate

BATCH = 4  # of each rank


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DDP(ResidualMLP(args.width, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = Noise(args.width)
    marks = Marks(args.marks)

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1

    for step in range(first, args.steps):
        start = (step * world_size + rank) * BATCH
        loss = loss_of(model, default_collate([data[index] for index in range(start, start + BATCH)]))
        loss.backward()
        local_loss = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if args.checkpoint and rank == 0 and step % args.checkpoint_every == args.checkpoint_every - 1:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            unfinished = args.checkpoint.with_suffix(".tmp")
            torch.save(state, unfinished)
            unfinished.replace(args.checkpoint)
        marks.write(rank=rank, step=step, loss=local_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
