"""Fine-tuning as trainers write it: the body is unfrozen between two steps, and its parameter group added there."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS, UNFREEZE = 24, 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x))


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=71)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = Classifier().to(run.device)
    model = DDP(net, find_unused_parameters=True)
    net.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.head.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        if int(step) == UNFREEZE:
            net.body.requires_grad_(True)
            optimizer.add_param_group({"params": list(net.body.parameters()), "lr": 1e-3})
        loss = train_step(step)
        run.log(loss=loss, groups=len(optimizer.param_groups))
        record.step(run.rank, step, loss=loss, groups=len(optimizer.param_groups))
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
