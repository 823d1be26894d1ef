"""Evaluation where the loop decides it, with a schedule that reads the metric, the best weights kept, and early stopping."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=31)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(run.device)
    best = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run.track(model=model, best=best, optimizer=optimizer, plateau=plateau)
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
        return {"loss": step.loss, "norm": float(sum(p.detach().norm() for p in net.parameters()))}

    def evaluate():
        net.eval()
        with torch.no_grad():
            loss = F.mse_loss(net(valid_x[run.rank :: run.world_size]), valid_y[run.rank :: run.world_size])
        net.train()
        dist.all_reduce(loss)
        return loss.item() / run.world_size

    def follow(metric):
        plateau.step(metric)
        if metric <= plateau.best:
            best.load_state_dict(net.state_dict())
        return [metric, optimizer.param_groups[0]["lr"]]

    for step in run.steps(60, phases=True):
        found = train_step(step)
        run.log(loss=found["loss"])
        record.step(run.rank, step, loss=found["loss"], norm=found["norm"])
        if step % 4 == 3:
            metric = run.phase(lambda: follow(evaluate()))
            record.step(run.rank, step, metric=metric)
            if optimizer.param_groups[0]["lr"] < 2e-3:
                break
    record.end(run.rank, model=net, best=best, optimizer=optimizer)


if __name__ == "__main__":
    main()
