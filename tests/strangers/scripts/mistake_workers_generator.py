"""A data set with a numpy generator of its own, in two loader workers: what a sample becomes depends on how many that worker has had."""
# strangers: expect=said

import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun


class Cutout(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(7)
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i].clone()
        begin = self.rng.integers(0, 13)
        x[begin : begin + 4] = 0
        return x, self.y[i]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=77)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Cutout(), num_workers=2)

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
