"""torch.optim.swa_utils.AveragedModel as an EMA, buffers averaged too."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


def net():
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 5))


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=2)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(net().to(run.device), broadcast_buffers=False)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    run.track(model=model, ema=ema, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 3, 16, generator=g), torch.randint(5, (240,), generator=g)))

    @run.step
    def train_step(step):
        optimizer.zero_grad()
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        ema.update_parameters(model.module)
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, averaged=int(ema.n_averaged))
    record.end(
        run.rank,
        weights=dict(model.module.named_parameters()),
        average=dict(ema.module.named_parameters()),
        optimizer=optimizer,
        own={"statistics": dict(model.module.named_buffers()), "averaged_statistics": dict(ema.module.named_buffers())},
    )


if __name__ == "__main__":
    main()
