"""Random numbers of torch, numpy and Python everywhere: in the data set, in the step, in a phase, and between steps."""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun


class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(360, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 360

    def __getitem__(self, i):
        return self.x[i] + 0.1 * random.gauss(0, 1) + torch.from_numpy(np.random.randn(12)).float() * 0.1


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=26)
def main(run):
    record = Record(sys.argv[1])
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, 12)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Noisy())
    temperature = 1.0

    @run.step
    def train_step(step):
        for x in data:
            mask = torch.from_numpy(np.random.rand(*x.shape) < 0.15)
            lam = random.betavariate(0.4, 0.4)
            mixed = lam * x + (1 - lam) * x.flip(0)
            step.backward(F.mse_loss(model(mixed.masked_fill(mask, 0.0)), mixed) * temperature)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def probe():
        run.log(probe=random.random() + np.random.rand())

    run.every(6, probe)
    for step in run.steps(24):
        temperature = 0.5 + random.random()
        shuffled = np.random.permutation(4).tolist()
        noise = torch.rand(2)
        loss = train_step(step)
        after = random.random()
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, own={"drawn": [temperature, shuffled, noise, after]})
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
