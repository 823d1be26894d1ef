"""Lookahead around Adam: every k steps the slow weights go half of the way, and the fast ones start there again."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Lookahead:
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.inner.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.add_(p.data - s, alpha=self.alpha)
                    p.data.copy_(s)

    def zero_grad(self):
        self.inner.zero_grad()

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.count = state["count"]
        for mine, theirs in zip(self.slow, state["slow"]):
            for m, t in zip(mine, theirs):
                m.copy_(t)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=8)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(run.device))
    inner = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = Lookahead(inner)
    run.track(model=model, optimizer=inner, lookahead=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, inner=inner, slow=optimizer.slow, count=optimizer.count)


if __name__ == "__main__":
    main()
