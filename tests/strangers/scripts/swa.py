"""Stochastic weight averaging: SWALR in the last half, an equal average, and update_bn on training data when all is done."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import rackrun

STEPS, SWA_START = 24, 12


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=6)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=SWA_START)
    swa_model = AveragedModel(net)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=4)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, swa_model=swa_model, swa_scheduler=swa_scheduler)
    g = torch.Generator().manual_seed(8)
    train = TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g))
    data = run.loader(train)

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if int(step) >= SWA_START:
            swa_model.update_parameters(net)
            swa_scheduler.step()
        else:
            scheduler.step()
        return step.loss

    def finish():
        update_bn(DataLoader(train, batch_size=24), swa_model)
        swa_model.eval()
        with torch.no_grad():
            logits = torch.cat([swa_model(x) for x, _ in DataLoader(train, batch_size=60)])
        accuracy = (logits.argmax(1) == train.tensors[1]).float().mean().item()
        run.log(accuracy=accuracy)
        record.end(
            run.rank, swa=swa_model, weights=dict(net.named_parameters()), optimizer=optimizer, accuracy=accuracy
        )

    run.at_end(finish)
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
        record.step(run.rank, step, loss=loss, lr=optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
