"""Lion by hand: gradients clipped by value and weights decayed through .data before the update, an EMA of weights and of buffers after it."""

import copy
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.data.add_(torch.sign(average * one + p.grad * (1 - one)), alpha=-group["lr"])
                average.mul_(two).add_(p.grad, alpha=1 - two)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(
        run.device
    )
    shadow = copy.deepcopy(net).eval()
    model = DDP(net)
    optimizer = Lion(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, shadow=shadow)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        for p in model.parameters():
            p.grad.data.clamp_(-0.05, 0.05)
            if p.dim() > 1:
                p.data.mul_(1 - 0.01 * optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        for mine, theirs in zip(shadow.parameters(), net.parameters()):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        for mine, theirs in zip(shadow.buffers(), net.buffers()):
            if mine.dtype.is_floating_point:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            else:
                mine.data.copy_(theirs.data)
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(
        run.rank,
        model=dict(net.named_parameters()),
        shadow=dict(shadow.named_parameters()),
        optimizer=optimizer,
        own={"statistics": dict(net.named_buffers()), "averages": dict(shadow.named_buffers())},
    )


if __name__ == "__main__":
    main()
