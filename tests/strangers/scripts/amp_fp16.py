"""fp16 autocast with a GradScaler that overflows now and then, and an average of weights that moves whether it did or not."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 30


class Average(nn.Module):
    def __init__(self, model):
        super().__init__()
        for i, p in enumerate(model.parameters()):
            self.register_buffer(f"p{i}", p.detach().clone())

    @torch.no_grad()
    def update(self, model):
        for mine, p in zip(self.buffers(), model.parameters()):
            mine.lerp_(p, 0.1)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=17)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    average = Average(model)
    run.track(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler, average=average)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(240, 16, generator=g)
    data = run.loader(TensorDataset(x, x.sum(1, keepdim=True).sin()))
    skipped = []

    @run.step
    def train_step(step):
        optimizer.zero_grad()
        total = 0.0
        for x, y in data:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(step.scale(loss)).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped.append(int(step))
        else:
            scheduler.step()
        average.update(model)
        return total

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, scale=scaler.get_scale())
        record.step(run.rank, step, own={"loss": loss}, scale=scaler.get_scale(), lr=optimizer.param_groups[0]["lr"])
    record.end(run.rank, model=model.module, optimizer=optimizer, scaler=scaler, average=average, scheduler=scheduler)


if __name__ == "__main__":
    main()
