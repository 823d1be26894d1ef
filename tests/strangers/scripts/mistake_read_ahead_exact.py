"""Wrong: micro-batches are read ahead where each gradient must be rounded by itself, before the next micro-batch."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 12


def one_ahead(batches):
    batches = iter(batches)
    current = next(batches, None)
    while current is not None:
        upcoming = next(batches, None)
        yield current
        current = upcoming


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=103, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 3)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 12, generator=g), torch.randint(3, (240,), generator=g)))

    @run.step
    def train_step(step):
        for inputs, labels in one_ahead(data):
            step.backward(F.cross_entropy(model(inputs), labels))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, model=model.module)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
