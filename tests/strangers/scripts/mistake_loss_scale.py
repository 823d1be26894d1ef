"""A loss scale of one's own in a plain object, a smoothed loss in a deque, and a meter of throughput that the progress bar shows."""
# strangers: expect=said

import sys
import time
from collections import deque

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class LossScale:
    def __init__(self):
        self.value, self.good = 2.0**16, 0

    def update(self, overflow):
        if overflow:
            self.value, self.good = self.value / 2, 0
        else:
            self.good += 1
            if self.good % 5 == 0:
                self.value *= 2


class Meter:
    def __init__(self):
        self.times, self.losses = deque(maxlen=10), deque(maxlen=10)

    def update(self, loss):
        self.times.append(time.perf_counter())
        self.losses.append(loss)

    def __str__(self):
        rate = (len(self.times) - 1) / max(self.times[-1] - self.times[0], 1e-9)
        return f"{sum(self.losses) / len(self.losses):.4f} at {rate:.1f}/s"


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=83)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale, meter = LossScale(), Meter()
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            (step.scale(F.cross_entropy(model(x), y)) * scale.value).backward()
        overflow = False
        for p in model.parameters():
            p.grad = (p.grad.half().float()) / scale.value
            overflow |= not torch.isfinite(p.grad).all()
        if not overflow:
            optimizer.step()
        scale.update(overflow)
        optimizer.zero_grad()
        meter.update(step.loss)
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss, scale=scale.value)
        if run.is_main:
            print(f"\r{meter}", end="")
        record.step(run.rank, step, loss=loss, scale=scale.value)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
