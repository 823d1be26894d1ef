"""Muon, written by hand, for the matrices of an FSDP2 model: the momentum is gathered, made orthogonal, and cut again; AdamW for the rest."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import TensorDataset

import rackrun


def orthogonal(g, steps=3):
    x = g / (g.norm() + 1e-7)
    wide = x.size(0) > x.size(1)
    x = x.T if wide else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if wide else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p.grad)
                state["buffer"].lerp_(p.grad, 1 - group["momentum"])
                whole = orthogonal(state["buffer"].full_tensor())
                p.add_(distribute_tensor(whole, p.device_mesh, p.placements), alpha=-group["lr"])


@rackrun.elastic(global_batch_size=12, micro_batch_size=2, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 35), nn.ReLU(), nn.Linear(35, 35), nn.ReLU(), nn.Linear(35, 4)).to(run.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    muon = Muon([p for p in model.parameters() if p.dim() == 2])
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=3e-3)
    run.track(model=model, muon=muon, adamw=adamw)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        muon.zero_grad()
        adamw.zero_grad()
        return step.loss

    def whole():
        record.end(run.rank, model={k: v.full_tensor() for k, v in model.named_parameters()})

    run.at_end(whole)
    for step in run.steps(18):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)


if __name__ == "__main__":
    main()
