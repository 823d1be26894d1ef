"""FSDP2 with exact reduction, resharding off for the root, gradient accumulation, and an EMA of the shards."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS = 16


class EMA:
    def __init__(self, model):
        self.average = {k: v.detach().clone() for k, v in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for k, v in model.named_parameters():
            self.average[k].mul_(0.9).add_(v, alpha=0.1)

    def state_dict(self):
        return dict(self.average)

    @torch.no_grad()
    def load_state_dict(self, state):
        for k in self.average:
            self.average[k].copy_(state[k])


@rackrun.elastic(global_batch_size=12, micro_batch_size=2, seed=42, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 36), nn.ReLU(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 3)).to(run.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ema = EMA(model)
    run.track(model=model, optimizer=optimizer, ema=ema)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(3, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        ema.update(model)
        optimizer.zero_grad()
        return step.loss

    def whole():
        full = {k: v.full_tensor() for k, v in model.named_parameters()}
        average = {k: v.full_tensor() for k, v in ema.average.items()}
        record.end(run.rank, model=full, ema=average)

    run.at_end(whole)
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)


if __name__ == "__main__":
    main()
