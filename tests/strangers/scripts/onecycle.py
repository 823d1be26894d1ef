"""OneCycleLR, which moves momentum as well; weight decay only on matrices; exact reduction."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=33, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GroupNorm(4, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 1e-2}, {"params": rest}], lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        if int(step) < STEPS - 1:
            scheduler.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, momentum=optimizer.param_groups[0]["momentum"])
    record.end(run.rank, model=net, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
