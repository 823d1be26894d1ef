"""A step of some milliseconds, and a save of a second by rank 0: to a slow disk, in a phase."""

import os
import sys
import time

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=12, micro_batch_size=4, seed=27)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 12, generator=g), torch.randint(2, (360,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def save():
        if not run.is_main:
            return
        path = os.path.join(os.path.dirname(sys.argv[1]), "model.pt")
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path + ".tmp")
        time.sleep(1.5)
        os.replace(path + ".tmp", path)
        print("saved", flush=True)

    run.every(10, save)
    for step in run.steps(30):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
