"""Mixed precision with micro-batches under no_sync, gradients that are views of DDP's buckets and are cleared in place, a gradient scaler that overflows,
an average of the weights, metrics by collectives of objects."""

import copy
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=2, seed=5)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(run.device)
    ema = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**14, growth_interval=3)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, ema=ema)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        last = len(data) - 1
        for i, (x, y) in enumerate(data):
            with nullcontext() if i == last else model.no_sync():
                with torch.autocast(run.device.type, dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x).float(), y)
                    if int(step) in (4, 9) and i == 1 and run.rank == 1:
                        loss = loss * float("inf")
                scaler.scale(step.scale(loss)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        with torch.no_grad():
            for mean, now in zip(ema.parameters(), net.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        optimizer.zero_grad(set_to_none=False)
        return step.loss, norm

    def metrics():
        sums = [None] * run.world_size
        dist.all_gather_object(sums, float(net[0].weight.detach().sum()))
        dist.barrier()
        told = [scheduler.get_last_lr()[0] if run.rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        run.log(metric=sum(sums), lr=told[0])

    run.every(4, metrics)
    for step in run.steps(16):
        loss, norm = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, norm=norm, scale=scaler.get_scale(), model=net)
    record.end(run.rank, model=net, optimizer=optimizer, ema=ema, scheduler=scheduler)


if __name__ == "__main__":
    main()
