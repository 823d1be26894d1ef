"""Training with a moving average that replaces the weights when it is over (or when the loss is good enough), saved in half precision."""

import copy
import os
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class EMA:
    def __init__(self, net, decay=0.9):
        self.net, self.shadow, self.decay = net, copy.deepcopy(net).requires_grad_(False), decay

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow.parameters(), self.net.parameters(), strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for s, p in zip(self.shadow.parameters(), self.net.parameters(), strict=True):
            kept = p.clone()
            p.copy_(s)
            s.copy_(kept)

    def state_dict(self):
        return self.shadow.state_dict()

    def load_state_dict(self, state):
        self.shadow.load_state_dict(state)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=88)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ema = EMA(net)
    run.track(model=model, optimizer=optimizer, ema=ema)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(360, 16, generator=g)
    data = run.loader(TensorDataset(x, x[:, :4].argmax(1)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        ema.update()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(40):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
        if loss < 0.75:
            break

    ema.swap()
    if run.is_main:
        path = os.path.join(os.path.dirname(sys.argv[1]), "ema.pt")
        torch.save(net.state_dict(), path + ".tmp")
        os.replace(path + ".tmp", path)
    half = copy.deepcopy(net).half()
    record.end(run.rank, model=net, ema=ema, half=half)


if __name__ == "__main__":
    main()
