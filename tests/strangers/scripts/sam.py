"""Sharpness-aware minimisation: climb to the worst neighbour, take the gradient there, come back, and step."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho, self.e = list(params), base, rho, []

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm() for p in self.params]))
        self.e = [p.grad * self.rho / (norm + 1e-12) for p in self.params]
        for p, e in zip(self.params, self.e):
            p.add_(e)
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, e in zip(self.params, self.e):
            p.sub_(e)
        self.base.step()
        self.base.zero_grad()


@rackrun.elastic(global_batch_size=24, micro_batch_size=8, seed=16)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sam = SAM(model.parameters(), optimizer)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g)))

    @run.step
    def train_step(step):
        batches = list(data)
        for x, y in batches:
            step.backward(F.cross_entropy(model(x), y))
        sam.first_step()
        for x, y in batches:
            step.backward(F.cross_entropy(model(x), y))
        sam.second_step()

    for step in run.steps(24):
        train_step(step)
        record.step(run.rank, step, model=model.module)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
