"""The same recipe, shorter: fp16, GradScaler, and step.loss for the logger."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=18)
def main(run):
    record = Record(sys.argv[1])
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(step.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, scale=scaler.get_scale())
    record.end(run.rank, model=model.module, optimizer=optimizer, scaler=scaler)


if __name__ == "__main__":
    main()
