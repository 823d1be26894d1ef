"""Instance discrimination: a bank of features of the whole data set in an object of its own, written after the forward of each batch."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

SAMPLES, DIM, STEPS = 240, 16, 24


class Indexed(Dataset):
    def __init__(self):
        self.x = torch.randn(SAMPLES, 24, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return i, self.x[i]


class MemoryBank:
    def __init__(self):
        self.features = F.normalize(torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(9)), dim=1)
        self.updates = 0

    def negatives(self, n):
        return self.features[torch.randint(SAMPLES, (n,))]

    def update(self, indices, features):
        self.features[indices] = F.normalize(0.5 * self.features[indices] + 0.5 * features, dim=1)
        self.updates += len(indices)

    def state_dict(self):
        return {"features": self.features, "updates": self.updates}

    def load_state_dict(self, state):
        self.features = state["features"].clone()
        self.updates = state["updates"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=13)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, DIM)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    bank = MemoryBank()
    run.track(model=model, optimizer=optimizer, bank=bank)
    data = run.loader(Indexed())

    @run.step
    def train_step(step):
        for indices, x in data:
            f = F.normalize(model(x), dim=1)
            logits = torch.cat([(f * bank.features[indices]).sum(1, keepdim=True), f @ bank.negatives(32).T], 1)
            step.backward(F.cross_entropy(logits / 0.1, torch.zeros(len(f), dtype=torch.long)))
            bank.update(indices, f.detach())
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, own={"bank": bank.features})
    record.end(run.rank, model=model.module, optimizer=optimizer, own={"bank": bank.features, "updates": bank.updates})


if __name__ == "__main__":
    main()
