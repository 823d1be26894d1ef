"""A schedule that is stepped at the beginning of the step, before the update, as in old code; by hand for one group, by torch for the other."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=35)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    body, head = nn.Linear(16, 32).to(run.device), nn.Linear(32, 4).to(run.device)
    model = DDP(nn.Sequential(body, nn.ReLU(), head))
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-3)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 10))
    run.track(model=model, optimizer=optimizer, head_optimizer=head_optimizer, scheduler=scheduler)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g)))

    @run.step
    def train_step(step):
        scheduler.step()
        for group in head_optimizer.param_groups:
            group["lr"] *= 0.97
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        head_optimizer.step()
        optimizer.zero_grad()
        head_optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(
            run.rank, step, loss=loss, lrs=[optimizer.param_groups[0]["lr"], head_optimizer.param_groups[0]["lr"]]
        )
    record.end(run.rank, model=model.module, optimizer=optimizer, head=head_optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
