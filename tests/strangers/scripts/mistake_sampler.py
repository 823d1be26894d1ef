"""A DistributedSampler of the old script: ranks get the right samples, until one is replaced."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=50)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    train = TensorDataset(torch.randn(360, 16, generator=g), torch.randint(4, (360,), generator=g))
    sampler = DistributedSampler(train, num_replicas=run.world_size, rank=run.rank)
    batches = iter(DataLoader(train, batch_size=4, sampler=sampler))

    @run.step
    def train_step(step):
        x, y = next(batches)
        step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(16):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
