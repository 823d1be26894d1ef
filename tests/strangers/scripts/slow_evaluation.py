"""An evaluation on all ranks that takes fifty steps' time, much of it in Python, and reduces what it finds."""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=12, micro_batch_size=4, seed=28)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(360, 12, generator=g), torch.randint(2, (360,), generator=g)
    data = run.loader(TensorDataset(x, y))

    @run.step
    def train_step(step):
        for batch, labels in data:
            step.backward(F.cross_entropy(model(batch), labels))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate():
        model.eval()
        correct = torch.zeros(())
        deadline = time.monotonic() + 1.0
        row = run.rank
        while row < len(x) or time.monotonic() < deadline:  # a metric that is slow
            with torch.no_grad():
                if row < len(x):
                    correct += model.module(x[row]).argmax() == y[row]
            row += run.world_size
        dist.all_reduce(correct)
        dist.barrier()
        model.train()
        run.log(accuracy=correct.item() / len(x))

    run.every(10, evaluate)
    for step in run.steps(30):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
