"""A mixture of experts whose router is balanced by a bias, moved by the load that all ranks have seen; weight and spectral norm as parametrizations."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import TensorDataset

import rackrun


class MoE(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(weight_norm(nn.Linear(width, width)) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        if self.training:
            self.load += F.one_hot(chosen, len(self.experts)).sum((0, 1)).float()
        gates = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    moe = MoE(24, 6)
    net = nn.Sequential(spectral_norm(nn.Linear(16, 24)), nn.ReLU(), moe, nn.ReLU(), nn.Linear(24, 4)).to(run.device)
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        load = moe.load.clone()
        dist.all_reduce(load)
        optimizer.step()
        with torch.no_grad():
            moe.bias += 0.01 * torch.sign(load.mean() - load)
            moe.load.zero_()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, bias=moe.bias)
    record.end(run.rank, model=dict(net.named_parameters()), bias=moe.bias, own={"vectors": dict(net.named_buffers())})


if __name__ == "__main__":
    main()
