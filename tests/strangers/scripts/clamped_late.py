"""Weights that are kept in a range through ``.data`` once training has settled, and of which the norms are logged."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS, FREE_STEPS, LIMIT = 20, 8, 0.12


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=91)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 8)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(360, 24, generator=g), torch.randint(8, (360,), generator=g)
    data = run.loader(TensorDataset(x, y))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        norms = [p.data.norm().item() for p in net.parameters()]
        if int(step) >= FREE_STEPS:
            for p in net.parameters():
                p.data.clamp_(-LIMIT, LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, norms

    for step in run.steps(STEPS):
        loss, norms = train_step(step)
        largest = max(p.data.abs().max().item() for p in net.parameters())
        run.log(loss=loss, largest=largest)
        record.step(run.rank, step, loss=loss, norms=norms, largest=largest)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
