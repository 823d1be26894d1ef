"""A curriculum that follows the losses, with a generator of its own; an average of the weights by hand; no update where the loss is too large."""
# strangers: shrinks=yes

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 30


class Curriculum:
    """How often each of four kinds of noise is drawn, by how hard it was lately."""

    def __init__(self):
        self.rng = np.random.default_rng(7)
        self.hard = np.ones(4)
        self.level, self.skipped, self.history = 0, 0, []

    def draw(self):
        return int(self.rng.choice(4, p=self.hard / self.hard.sum()))

    def update(self, kind, loss):
        self.hard[kind] = 0.7 * self.hard[kind] + 0.3 * loss
        self.history.append(round(loss, 6))
        if len(self.history) >= 4 and np.mean(self.history[-4:]) < 1.2:
            self.level, self.history = self.level + 1, []

    def state_dict(self):
        return {"hard": self.hard.tolist(), "level": self.level, "skipped": self.skipped, "history": list(self.history)}

    def load_state_dict(self, state):
        self.hard, self.level = np.array(state["hard"]), state["level"]
        self.skipped, self.history = state["skipped"], list(state["history"])


class Average(nn.Module):
    def __init__(self, model):
        super().__init__()
        for index, p in enumerate(model.parameters()):
            self.register_buffer(f"mean{index}", p.detach().clone())
        self.register_buffer("updates", torch.tensor(0))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        for index, p in enumerate(model.parameters()):
            getattr(self, f"mean{index}").lerp_(p, 0.1)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=99)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 3)).to(run.device))
    average = Average(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curriculum = Curriculum()
    noise = torch.Generator().manual_seed(5)
    run.track(model=model, optimizer=optimizer, average=average)
    run.track(curriculum=curriculum, rng=curriculum.rng, noise=noise)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(240, 12, generator=g)
    data = run.loader(TensorDataset(x, x[:, :3].argmax(1)))

    @run.step
    def train_step(step):
        kind = curriculum.draw()
        shift = torch.randn(12, generator=noise) * (kind + curriculum.level)
        losses = []
        for inputs, labels in data:
            loss = F.cross_entropy(model(inputs + shift), labels)
            losses.append(loss.detach())
            step.backward(loss)
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        mean = (mean / run.world_size).item()
        curriculum.update(kind, mean)
        if mean < 1.6:
            optimizer.step()
            average.update(model.module)
        else:
            curriculum.skipped += 1
        optimizer.zero_grad()
        return step.loss, kind

    for step in run.steps(STEPS):
        loss, kind = train_step(step)
        run.log(loss=loss, kind=kind, skipped=curriculum.skipped)
        record.step(run.rank, step, loss=loss, kind=kind, level=curriculum.level, skipped=curriculum.skipped)
    record.end(run.rank, model=model.module, optimizer=optimizer, average=average, curriculum=curriculum)


if __name__ == "__main__":
    main()
