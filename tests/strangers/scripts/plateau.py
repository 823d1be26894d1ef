"""ReduceLROnPlateau on the loss that all ranks share, behind a warm-up."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=34)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(run.device))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.02)
    run.track(model=model, optimizer=optimizer, plateau=plateau)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randn(360, 1, generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.smooth_l1_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if int(step) >= 4:
            plateau.step(step.loss)
        return step.loss

    for step in run.steps(30):
        loss = train_step(step)
        run.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
        record.step(run.rank, step, loss=loss, lr=optimizer.param_groups[0]["lr"])
    record.end(run.rank, model=model.module, optimizer=optimizer, plateau=plateau)


if __name__ == "__main__":
    main()
