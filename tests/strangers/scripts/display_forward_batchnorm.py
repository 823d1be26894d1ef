"""As a tutorial shows a few pictures after each update: a forward of the DDP model with BatchNorm and dropout, in train() and without no_grad."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 20


@rackrun.elastic(global_batch_size=20, micro_batch_size=4, seed=94)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3))
    model = DDP(net.to(run.device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(264, 12, generator=g), torch.randint(3, (264,), generator=g)
    data = run.loader(TensorDataset(x[:240], y[:240]))
    shown = x[240:].to(run.device)

    @run.step
    def train_step(step):
        for inputs, labels in data:
            step.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, model(shown).argmax(1).sum().item()

    def evaluate():
        model.eval()
        accuracy = (model(shown).argmax(1) == y[240:].to(run.device)).float().mean().item()
        model.train()
        run.log(accuracy=accuracy)

    run.every(4, evaluate)
    for step in run.steps(STEPS):
        loss, pred = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, {"pred": pred}, loss=loss, weights=list(model.parameters()))
    record.end(run.rank, {"model": net}, optimizer=optimizer)


if __name__ == "__main__":
    main()
