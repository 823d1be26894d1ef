"""Early stopping: validation after each small epoch, patience, and a break out of the loop; the best weights are kept for the end."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

PATIENCE, EVERY = 2, 4


class EarlyStopping:
    def __init__(self):
        self.best, self.bad, self.weights, self.checks = float("inf"), 0, None, 0

    def update(self, loss, model):
        self.checks += 1
        if loss < self.best - 1e-4:
            self.best, self.bad, self.weights = loss, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1

    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "weights": self.weights, "checks": self.checks}

    def load_state_dict(self, state):
        self.best, self.bad, self.weights, self.checks = (state[name] for name in ("best", "bad", "weights", "checks"))


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=30)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    stopping = EarlyStopping()
    run.track(model=model, optimizer=optimizer, stopping=stopping)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(72, 10, generator=g), torch.randn(72, 1, generator=g)
    valid_x, valid_y = torch.randn(60, 10, generator=g), torch.randn(60, 1, generator=g)
    data = run.loader(TensorDataset(x, y))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def validate():
        with torch.no_grad():
            loss = F.mse_loss(net(valid_x[run.rank :: run.world_size]), valid_y[run.rank :: run.world_size])
        dist.all_reduce(loss)
        stopping.update(loss.item() / run.world_size, net)

    run.every(EVERY, validate)
    for step in run.steps(200):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
        if stopping.bad >= PATIENCE:
            break
    net.load_state_dict(stopping.weights)
    record.end(run.rank, model=net, best=stopping.best, stopped=stopping.checks * EVERY, optimizer=optimizer)


if __name__ == "__main__":
    main()
