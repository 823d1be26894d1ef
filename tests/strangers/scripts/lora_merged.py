"""LoRA whose adapters are merged into the base when training is over, and a last evaluation of what is then saved whole."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / r)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r
        self.merged = False

    def forward(self, x):
        out = self.base(x)
        return out if self.merged else out + self.scaling * (x @ self.a.T @ self.b.T)

    @torch.no_grad()
    def merge(self):
        self.base.weight.data += self.scaling * (self.b @ self.a)
        self.merged = True


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=87)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(LoRALinear(nn.Linear(24, 64)), nn.GELU(), LoRALinear(nn.Linear(64, 8))).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(360, 24, generator=g), torch.randint(8, (360,), generator=g)
    data = run.loader(TensorDataset(x, y))

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

    for module in net:
        if isinstance(module, LoRALinear):
            module.merge()
    net.eval()
    rows = slice(run.rank, None, run.world_size)
    with torch.no_grad():
        total = F.cross_entropy(net(x[rows].to(run.device)), y[rows].to(run.device), reduction="sum")
    dist.all_reduce(total)
    if run.is_main:
        path = os.path.join(os.path.dirname(sys.argv[1]), "merged.pt")
        torch.save(net.state_dict(), path + ".tmp")
        os.replace(path + ".tmp", path)
    record.end(run.rank, model=net, optimizer=optimizer, total=total)


if __name__ == "__main__":
    main()
