"""A meter whose state_dict returns copies, numbers and tensors by value, as careful people write it; moved in the forward loop and after the update."""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Normalizer:
    """Running mean and variance of inputs (Welford), in numpy."""

    def __init__(self, n):
        self._n, self._mean, self._m2 = 1.0, np.zeros(n), np.ones(n)
        self._history = []

    def update(self, x):
        for row in x.numpy().astype(np.float64):
            self._n += 1
            delta = row - self._mean
            self._mean = self._mean + delta / self._n
            self._m2 = self._m2 + delta * (row - self._mean)

    def __call__(self, x):
        std = np.sqrt(self._m2 / self._n) + 1e-6
        return ((x - torch.from_numpy(self._mean)) / torch.from_numpy(std)).float()

    def note(self, loss):
        self._history.append(round(loss, 6))
        del self._history[:-5]

    def state_dict(self):
        return copy.deepcopy(
            {"n": self._n, "mean": self._mean.tolist(), "m2": self._m2.tolist(), "history": self._history}
        )

    def load_state_dict(self, state):
        self._n, self._history = state["n"], list(state["history"])
        self._mean, self._m2 = np.array(state["mean"]), np.array(state["m2"])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=39)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    normalizer = Normalizer(6)
    run.track(model=model, optimizer=optimizer, normalizer=normalizer)
    g = torch.Generator().manual_seed(1)
    x = 3 + 2 * torch.randn(360, 6, generator=g)
    data = run.loader(TensorDataset(x, x.prod(1, keepdim=True).tanh()))

    @run.step
    def train_step(step):
        for x, y in data:
            normalizer.update(x)
            step.backward(F.mse_loss(model(normalizer(x)), y))
        optimizer.step()
        optimizer.zero_grad()
        normalizer.note(step.loss)
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, own={"normalizer": normalizer})
    record.end(run.rank, model=model.module, optimizer=optimizer, own={"normalizer": normalizer})


if __name__ == "__main__":
    main()
