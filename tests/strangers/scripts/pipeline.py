"""A pipeline of two stages by hand, send and recv between neighbours, beside data parallelism."""
# strangers: ranks=4

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

WIDTH = 24


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=45, mesh={"dp": -1, "pp": 2})
def main(run):
    record = Record(sys.argv[1])
    pp = run.mesh["pp"]
    stage, other = pp.get_local_rank(), dist.get_global_rank(pp.get_group(), 1 - pp.get_local_rank())
    torch.manual_seed(stage)
    part = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU()) if stage == 0 else nn.Sequential(nn.Linear(WIDTH, 4))
    model = DDP(part.to(run.device), process_group=run.mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(320, 16, generator=g), torch.randint(4, (320,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            if stage == 0:
                h = model(x)
                dist.send(h.detach(), other)
                grad = torch.empty_like(h)
                dist.recv(grad, other)
                h.backward(grad)
            else:
                h = torch.empty(len(x), WIDTH)
                dist.recv(h, other)
                h.requires_grad_(True)
                loss = F.cross_entropy(model(h), y)
                step.backward(loss)
                dist.send(h.grad, other)
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(16):
        train_step(step)
        record.step(run.rank, step)
    record.end(run.rank, own={"model": model.module, "optimizer": optimizer})


if __name__ == "__main__":
    main()
