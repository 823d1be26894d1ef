"""A guard that skips the update where the gradient is not finite or too large, with counters, an EMA and a schedule after it."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

STEPS = 30


class Outliers(Dataset):
    """One sample of forty is a spike, one of sixty is NaN."""

    def __init__(self):
        self.x = torch.randn(360, 12, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        y = self.x[i].sum().tanh()
        if i % 40 == 7:
            y = y * 1e4
        if i % 60 == 11:
            y = y * float("nan")
        return self.x[i], y


class Guard:
    def __init__(self, limit):
        self.limit, self.skipped, self.ema_norm = limit, 0, 1.0

    def ok(self, norm):
        norm = float(norm)
        good = norm == norm and norm < self.limit * self.ema_norm
        if good:
            self.ema_norm = 0.9 * self.ema_norm + 0.1 * norm
        else:
            self.skipped += 1
        return good

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=31)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 1)).to(run.device))
    ema = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    guard = Guard(10.0)

    class Ema:
        def state_dict(self):
            return {"weights": ema}

        def load_state_dict(self, state):
            for mine, theirs in zip(ema, state["weights"]):
                mine.copy_(theirs)

    run.track(model=model, optimizer=optimizer, scheduler=scheduler, guard=guard, ema=Ema())
    data = run.loader(Outliers())

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.mse_loss(model(x).squeeze(1), y))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if guard.ok(norm):
            optimizer.step()
        with torch.no_grad():
            for mine, p in zip(ema, model.parameters()):
                mine.mul_(0.9).add_(p, alpha=0.1)
        scheduler.step()
        optimizer.zero_grad()

    for step in run.steps(STEPS):
        train_step(step)
        run.log(skipped=guard.skipped)
        record.step(run.rank, step, skipped=guard.skipped, norm=guard.ema_norm, ema=ema)
    record.end(run.rank, model=model.module, optimizer=optimizer, ema=ema, guard=guard, scheduler=scheduler)


if __name__ == "__main__":
    main()
