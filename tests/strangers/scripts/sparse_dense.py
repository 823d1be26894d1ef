"""A recommender: a sparse embedding by SparseAdam, the rest by Adagrad."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

ITEMS, STEPS = 500, 20


class Clicks(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.items = torch.randint(ITEMS, (360, 4), generator=g)
        self.y = torch.rand(360, generator=g).round()

    def __len__(self):
        return 360

    def __getitem__(self, i):
        return self.items[i], self.y[i]


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, 16, sparse=True)
        self.top = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, items):
        return self.top(self.items(items).flatten(1)).squeeze(1)


@rackrun.elastic(global_batch_size=24, micro_batch_size=8, seed=14)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(Recommender().to(run.device))
    sparse = torch.optim.SparseAdam(model.module.items.parameters(), lr=0.01)
    dense = torch.optim.Adagrad(model.module.top.parameters(), lr=0.05)
    run.track(model=model, sparse=sparse, dense=dense)
    data = run.loader(Clicks())

    @run.step
    def train_step(step):
        for items, y in data:
            step.backward(F.binary_cross_entropy_with_logits(model(items), y))
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, sparse=sparse, dense=dense)


if __name__ == "__main__":
    main()
