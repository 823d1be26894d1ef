"""Micro-batches read ahead where ranks have different numbers of them: their weights are recorded and passed on."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


def one_ahead(step, batches):
    last = None
    for batch in batches:
        current = batch, step.weight
        if last is not None:
            yield last
        last = current
    yield last


@rackrun.elastic(global_batch_size=20, micro_batch_size=4, seed=96)
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
        batches = [(batch, step.weight) for batch in data] if int(step) % 2 else one_ahead(step, data)
        total = 0.0
        for (inputs, labels), weight in batches:
            step.backward(F.cross_entropy(model(inputs), labels), weight=weight)
            total += weight
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, total

    for step in run.steps(STEPS):
        loss, total = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, {"total": total}, loss=loss, model=model.module)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
