"""A forward that raises on a bad batch, which the script catches and skips; it counts what it has skipped."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class BadBatch(ValueError):
    pass


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise BadBatch("the input is not finite")
        return self.net(x).squeeze(1)


class Skipped:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=75)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(Regressor().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    skipped = Skipped()
    run.track(model=model, optimizer=optimizer, skipped=skipped)
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(1))
    y = x.sin().sum(1)
    x[17::60, 3] = float("nan")
    data = run.loader(TensorDataset(x, y))

    @run.step
    def train_step(step):
        for x, y in data:
            try:
                step.backward(F.mse_loss(model(x), y))
            except BadBatch:
                skipped.count += 1
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss, skipped=skipped.count)
        record.step(run.rank, step, {"skipped": skipped.count}, loss=loss)
    record.end(run.rank, {"skipped": skipped.count}, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
