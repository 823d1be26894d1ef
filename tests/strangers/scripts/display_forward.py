"""Predictions to look at, from a forward of the DDP model that nobody calls backward on: in the step, at its end, and between steps, without no_grad."""
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


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=93)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(264, 12, generator=g), torch.randint(3, (264,), generator=g)
    data = run.loader(TensorDataset(x[:240], y[:240]))
    shown = x[240:].to(run.device)

    @run.step
    def train_step(step):
        if int(step) % 4 == 1:
            before = model(shown)
        for number, (inputs, labels) in enumerate(data):
            loss = F.cross_entropy(model(inputs), labels)
            if int(step) % 4 == 2 and number == 0:
                before = model(shown)
            step.backward(loss)
            if int(step) % 4 == 3 and number == 0:
                before = model(shown)
        optimizer.step()
        optimizer.zero_grad()
        after = model(shown)
        return step.loss, (after - before if int(step) % 4 else after)

    for step in run.steps(STEPS):
        loss, change = train_step(step)
        run.log(loss=loss, change=change.norm().item())
        record.step(run.rank, step, loss=loss, change=change, model=model.module)
        if int(step) % 3 == 2:
            pred = model(shown).argmax(1)
            run.log(accuracy=(pred == y[240:]).float().mean().item())
            record.step(run.rank, step, pred=pred)
    record.end(run.rank, model=model.module, optimizer=optimizer, pred=model(shown))


if __name__ == "__main__":
    main()
