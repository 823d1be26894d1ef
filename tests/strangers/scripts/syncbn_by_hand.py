"""BatchNorm over all ranks, written out for CPUs (torch's SyncBatchNorm is for GPUs): statistics by all_reduce in the forward."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distf
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class SyncBN(nn.Module):
    def __init__(self, n, momentum=0.1):
        super().__init__()
        self.weight, self.bias, self.momentum = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n)), momentum
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))

    def forward(self, x):
        if self.training:
            stats = distf.all_reduce(torch.cat([x.mean(0), x.pow(2).mean(0)])) / dist.get_world_size()
            mean, square = stats.chunk(2)
            var = square - mean.pow(2)
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var, self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight + self.bias


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=24)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), SyncBN(24), nn.ReLU(), nn.Linear(24, 3)).to(run.device)
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 12, generator=g), torch.randint(3, (360,), generator=g)))

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
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
