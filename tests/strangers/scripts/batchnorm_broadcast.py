"""BatchNorm as DDP has it by default: rank 0's buffers are broadcast before each forward."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=23)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(
        TensorDataset(torch.randn(360, 12, generator=g), torch.randint(3, (360,), generator=g)), num_workers=1
    )

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(20):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(
        run.rank,
        weights=dict(net.named_parameters()),
        optimizer=optimizer,
        own={"statistics": dict(net.named_buffers())},
    )


if __name__ == "__main__":
    main()
