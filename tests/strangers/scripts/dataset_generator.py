"""A data set that augments by a numpy generator of its own, which the script tracks; batches are fetched ahead."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun


class Jittered(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(7)
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        shift = int(self.rng.integers(-2, 3))
        return self.x[i].roll(shift) * float(self.rng.uniform(0.8, 1.2)), self.y[i]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=76)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = Jittered()
    run.track(model=model, optimizer=optimizer, augmentation=train.rng)
    data = run.loader(train, prefetch=3)

    @run.step
    def train_step(step):
        seen = 0.0
        for x, y in data:
            seen += float(x.double().sum())
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, seen

    for step in run.steps(24):
        loss, seen = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, {"seen": seen}, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
