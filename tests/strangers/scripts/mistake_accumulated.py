"""Wrong: gradients are clipped in every step, but cleared and used in every second one only."""
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


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=100)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 12, generator=g), torch.randint(3, (240,), generator=g)))

    @run.step
    def train_step(step):
        for inputs, labels in data:
            step.backward(F.cross_entropy(model(inputs), labels) / 2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if int(step) % 2:
            optimizer.step()
            optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
