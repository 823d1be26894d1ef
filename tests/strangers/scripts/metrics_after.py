"""Metrics reduced after the update, as loggers want them, and then a schedule and an average of the weights."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=36)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
    ema = AveragedModel(net, avg_fn=get_ema_avg_fn(0.9))
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g)))

    @run.step
    def train_step(step):
        optimizer.zero_grad()
        local, correct = torch.zeros(()), torch.zeros(())
        for x, y in data:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            step.backward(loss)
            local += loss.detach()
            correct += (logits.argmax(1) == y).sum()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        metrics = torch.stack([local, correct, norm])
        dist.all_reduce(metrics)
        scheduler.step()
        ema.update_parameters(net)
        return (metrics / run.world_size).tolist()

    for step in run.steps(24):
        loss, correct, norm = train_step(step)
        run.log(loss=loss, correct=correct, norm=norm)
        record.step(run.rank, step, loss=loss, correct=correct, norm=norm)
    record.end(run.rank, model=net, optimizer=optimizer, scheduler=scheduler, ema=ema)


if __name__ == "__main__":
    main()
