"""Label smoothing by running confusion statistics in the loss, augmentation by Python's and numpy's generators, and a curriculum of difficulty."""

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


class Augmented(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if random.random() < 0.5:
            x = x.flip(0)
        x = x + float(np.random.normal(0, 0.1)) + 0.1 * torch.randn(16)
        return x, self.y[i]


class OnlineSmoothing(nn.Module):
    """Targets are softened by what was predicted for their class so far."""

    def __init__(self, classes):
        super().__init__()
        self.register_buffer("table", torch.full((classes, classes), 1 / classes))
        self.register_buffer("count", torch.zeros(classes, dtype=torch.long))

    def forward(self, logits, y):
        soft = 0.9 * F.one_hot(y, len(self.table)).float() + 0.1 * self.table[y]
        if self.training:
            with torch.no_grad():
                for row, label in zip(logits.softmax(-1), y):
                    self.table[label].lerp_(row, 0.05)
                    self.count[label] += 1
        return -(soft * logits.log_softmax(-1)).sum(-1).mean()


class Difficulty:
    def __init__(self):
        self.level, self.history = 0.0, []

    def update(self, loss):
        self.history = [*self.history[-4:], loss]
        if sum(self.history) / len(self.history) < 1.6 - self.level / 4:
            self.level += 0.25

    def state_dict(self):
        return {"level": self.level, "history": self.history}

    def load_state_dict(self, state):
        self.level, self.history = state["level"], list(state["history"])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)).to(run.device))
    criterion, difficulty = OnlineSmoothing(4).to(run.device), Difficulty()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    run.track(model=model, criterion=criterion, optimizer=optimizer, difficulty=difficulty)
    data = run.loader(Augmented())

    @run.step
    def train_step(step):
        for x, y in data:
            noise = difficulty.level * torch.randn_like(x)
            step.backward(criterion(model(x + noise), y))
        optimizer.step()
        difficulty.update(step.loss)
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss, level=difficulty.level)
        record.step(run.rank, step, loss=loss, level=difficulty.level)
    record.end(run.rank, model=model.module, optimizer=optimizer, own={"statistics": criterion})


if __name__ == "__main__":
    main()
