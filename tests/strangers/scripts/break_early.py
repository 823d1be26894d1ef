"""break out of run.steps: run.at_end follows all the same."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=50)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    train = TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g))
    data = run.loader(train)

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def save():
        if run.is_main:
            print("saved", flush=True)

    run.at_end(save)
    for step in run.steps(16):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
        if loss < 1.38:
            break
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
