"""L-BFGS on the whole batch, with the closure that torch asks for."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=60, micro_batch_size=20, seed=15)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).to(run.device))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    run.track(model=model, optimizer=optimizer)
    x = torch.rand(240, 3, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(x, (3 * x).sin().prod(1, keepdim=True)))

    @run.step
    def train_step(step):
        batches = list(data)

        def closure():
            optimizer.zero_grad()
            total = 0.0
            for x, y in batches:
                loss = F.mse_loss(model(x), y)
                step.backward(loss)
                total = total + loss.detach()
            return total

        optimizer.step(closure)

    for step in run.steps(16):
        train_step(step)
        record.step(run.rank, step, model=model.module)
    record.end(run.rank, model=model.module, own={"optimizer": optimizer})


if __name__ == "__main__":
    main()
