"""Schedule-free SGD by hand: weights are taken to the average for an evaluation in a phase, and back; train() and eval() flip with them."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class ScheduleFree(torch.optim.Optimizer):
    """Parameters are y while training and x while evaluating; z is kept beside them."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["training"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["training"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            rate = 1 / group["k"]
            for p in group["params"]:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(z, rate)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - rate) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    # The middle one is larger than what is always copied.
    net = nn.Sequential(
        nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Dropout(0.1), nn.Linear(600, 4)
    ).to(run.device)
    model = DDP(net)
    optimizer = ScheduleFree(model.parameters())
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)
    data = run.loader(TensorDataset(x, y))
    seen = []

    @run.step
    def train_step(step):
        model.train()
        for a, b in data:
            step.backward(F.cross_entropy(model(a), b))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate():
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            rows = slice(run.rank, None, run.world_size)
            loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
        dist.all_reduce(loss)
        model.train()
        optimizer.train()
        seen.append(loss.item() / len(x))

    run.every(4, evaluate)
    for step in run.steps(20):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
