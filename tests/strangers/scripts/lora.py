"""LoRA: a frozen base model with small trained adapters; only these are saved."""
# strangers: shrinks=yes

import os
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / r)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.base(x) + self.scaling * (self.dropout(x) @ self.a.T @ self.b.T)


def adapters(model):
    return {k: v for k, v in model.named_parameters() if v.requires_grad}


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=19, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(LoRALinear(nn.Linear(24, 64)), nn.GELU(), LoRALinear(nn.Linear(64, 8))).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(adapters(net).values(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 24, generator=g), torch.randint(8, (360,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def save():
        if run.is_main:
            path = os.path.join(os.path.dirname(sys.argv[1]), "adapter.pt")
            torch.save(adapters(net), path + ".tmp")
            os.replace(path + ".tmp", path)

    run.every(8, save)
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
