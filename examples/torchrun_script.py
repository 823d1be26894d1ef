"""A torchrun script as many are: DDP, a checkpoint on disk every few steps, and a resume from it. It knows nothing of rackrun.

    torchrun --standalone --nproc-per-node 4 examples/torchrun_script.py
    rackrun  --standalone --nproc-per-node 4 --max-restarts 3 examples/torchrun_script.py

Under rackrun it runs as it is. After a failure its workers are started again, and go on at the newest checkpoint. What
`train_gpt.py` gets (no restart, no lost steps, the same bits) takes the decorator.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/torchrun_script.pt"))
    parser.add_argument("--checkpoint-every", type=int, default=10)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    first = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
        if rank == 0:
            print(f"resumed after step {state['step']}", flush=True)

    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % args.checkpoint_every == args.checkpoint_every - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            unfinished = args.checkpoint.with_suffix(".tmp")
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished
            )
            unfinished.replace(args.checkpoint)  # whole, or not at all
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
