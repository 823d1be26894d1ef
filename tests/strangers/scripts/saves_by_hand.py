"""Rank 0 saves by torch.save every few steps between two steps, keeps the best model by an evaluation, and loads it at the end."""

import copy
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


class Best:
    def __init__(self):
        self.loss, self.weights = float("inf"), {}

    def state_dict(self):
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state):
        self.loss, self.weights = state["loss"], dict(state["weights"])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(run.device)
    model, best = DDP(net), Best()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 19),
        ],
        [5],
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)
    data = run.loader(TensorDataset(x, y))
    folder = os.path.dirname(sys.argv[1])

    @run.step
    def train_step(step):
        net.train()
        for a, b in data:
            step.backward(F.cross_entropy(model(a), b))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate():
        net.eval()
        with torch.no_grad():
            rows = slice(run.rank, None, run.world_size)
            loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
        dist.all_reduce(loss)
        if loss.item() < best.loss:
            best.loss, best.weights = loss.item(), copy.deepcopy(net.state_dict())
        net.train()

    run.every(3, evaluate)

    def finish():
        net.load_state_dict(best.weights)
        record.end(run.rank, model=net, best=best.loss, optimizer=optimizer)

    run.at_end(finish)
    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
        if run.rank == 0 and step % 5 == 4:
            path = os.path.join(folder, f"step-{step}.pt")
            torch.save(
                {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": int(step)}, path + ".tmp"
            )
            os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
