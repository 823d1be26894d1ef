"""Two loader workers, augmentation by torch, numpy and random, a collate function of its own."""
# strangers: shrinks=yes

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


class Crops(Dataset):
    def __init__(self):
        self.x = np.random.default_rng(1).standard_normal((360, 40)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        start = random.randint(0, 8)
        crop = self.x[i, start : start + 32] * np.float32(np.random.uniform(0.8, 1.2))
        return crop + 0.05 * torch.randn(32).numpy(), int(self.x[i, 0] > 0)


def collate(samples):
    x = torch.from_numpy(np.stack([x for x, _ in samples]))
    y = torch.tensor([y for _, y in samples])
    if random.random() < 0.5:  # mixup, of the whole batch or not at all
        return 0.7 * x + 0.3 * x.roll(1, 0), y
    return x, y


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=25)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Crops(), collate=collate, num_workers=2, prefetch=2)

    @run.step
    def train_step(step):
        seen = 0.0
        for x, y in data:
            seen += float(x.double().sum())
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, seen

    for step in run.steps(20):
        loss, seen = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, own={"seen": seen})
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
