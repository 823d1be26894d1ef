"""Muon-like recipe: matrices by SGD with Nesterov, everything else by AdamW; each with a schedule of its own."""
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


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=12, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 5)).to(run.device)
    model = DDP(net)
    matrices = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() < 2]
    opt_m = torch.optim.SGD(matrices, lr=0.05, momentum=0.95, nesterov=True)
    opt_a = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 8)) for o in (opt_m, opt_a)]
    run.track(model=model, opt_m=opt_m, opt_a=opt_a, schedule_m=schedules[0], schedule_a=schedules[1])
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 20, generator=g), torch.randint(5, (360,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y, label_smoothing=0.1))
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimizer, schedule in zip((opt_m, opt_a), schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return step.loss, float(norm)

    for step in run.steps(STEPS):
        loss, norm = train_step(step)
        run.log(loss=loss, norm=norm)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=net, opt_m=opt_m, opt_a=opt_a, schedules=[s.last_epoch for s in schedules])


if __name__ == "__main__":
    main()
