"""BYOL: an online network predicts what a target network makes of the other view; the target is a moving average of the online one."""

import copy
import math
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS, BASE_TAU = 24, 0.9


def mlp(width_in, width_out):
    return nn.Sequential(nn.Linear(width_in, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, width_out))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = mlp(20, 12)
        self.predictor = mlp(12, 12)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.tau = BASE_TAU

    def forward(self, a, b):
        def side(x, y):
            p = F.normalize(self.predictor(self.online(x)), dim=-1)
            with torch.no_grad():
                t = F.normalize(self.target(y), dim=-1)
            return 2 - 2 * (p * t).sum(-1)

        return (side(a, b) + side(b, a)).mean()

    @torch.no_grad()
    def update_target(self, step):
        self.tau = 1 - (1 - BASE_TAU) * (math.cos(math.pi * step / STEPS) + 1) / 2
        for o, t in zip(self.online.parameters(), self.target.parameters()):
            t.data.mul_(self.tau).add_(o.data, alpha=1 - self.tau)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=7)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(BYOL().to(run.device))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TensorDataset(torch.randn(480, 20, generator=torch.Generator().manual_seed(3))))

    @run.step
    def train_step(step):
        for (x,) in data:
            a, b = x + 0.1 * torch.randn_like(x), F.dropout(x, 0.2)
            step.backward(model(a, b))
        optimizer.step()
        model.module.update_target(int(step))
        optimizer.zero_grad(set_to_none=True)
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, tau=model.module.tau)
        record.step(run.rank, step, loss=loss, target=model.module.target)
    record.end(
        run.rank,
        online=model.module.online,
        target=model.module.target,
        predictor=model.module.predictor,
        optimizer=optimizer,
    )


if __name__ == "__main__":
    main()
