"""AutoClip (a percentile of all norms so far), mixup by numpy in the step, gradient noise from a generator of its own, warm restarts."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class AutoClip:
    """https://arxiv.org/abs/2007.14469"""

    def __init__(self, percentile):
        self.percentile = percentile
        self.history = []

    def __call__(self, parameters):
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self.history.append(norm.item())
        limit = float(np.percentile(self.history, self.percentile))
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return limit

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


class Softening:
    """Label smoothing that falls as the loss does."""

    value = 0.2

    def update(self, loss):
        self.value = min(self.value, 0.1 * loss)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=74)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4)).to(run.device))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5, T_mult=2)
    clip, softening = AutoClip(40), Softening()
    noise = torch.Generator(run.device).manual_seed(99)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, clip=clip, softening=softening, generator=noise)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))
    parameters = list(model.parameters())

    @run.step
    def train_step(step):
        for x, y in data:
            lam, order = np.random.beta(0.4, 0.4), torch.from_numpy(np.random.permutation(len(x)))
            targets = F.one_hot(y, 4).float()
            out = model(lam * x + (1 - lam) * x[order])
            mixed = lam * targets + (1 - lam) * targets[order]
            step.backward(F.cross_entropy(out, mixed, label_smoothing=softening.value))
        limit = clip(parameters)
        for p in parameters:
            p.grad += 1e-3 * torch.randn(p.shape, generator=noise, device=p.device)
        optimizer.step()
        scheduler.step()
        softening.update(step.loss)
        optimizer.zero_grad()
        return step.loss, limit

    for step in run.steps(24):
        loss, limit = train_step(step)
        run.log(loss=loss, limit=limit, smoothing=softening.value)
        record.step(run.rank, step, loss=loss, limit=limit, smoothing=softening.value)
    record.end(
        run.rank, model=model.module, optimizer=optimizer, scheduler=scheduler, clip=clip, noise=noise.get_state()
    )


if __name__ == "__main__":
    main()
