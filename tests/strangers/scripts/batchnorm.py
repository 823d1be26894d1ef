"""A small convolutional net with BatchNorm whose statistics are each rank's own, validated every few steps on all ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun


class Images(Dataset):
    def __init__(self, n, seed, train):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y, self.train = torch.randn(n, 3, 8, 8, generator=g), torch.randint(4, (n,), generator=g), train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x, self.y[i]


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=22)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(
        block(3, 8), nn.MaxPool2d(2), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model = DDP(net.to(run.device), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    run.track(model=model, optimizer=optimizer)
    data, valid = run.loader(Images(360, 1, train=True)), Images(60, 2, train=False)

    @run.step
    def train_step(step):
        model.train()
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def validate():
        model.eval()
        with torch.no_grad():
            correct = (net(valid.x).argmax(1) == valid.y).sum()
        dist.all_reduce(correct)
        run.log(correct=int(correct))

    run.every(5, validate)
    for step in run.steps(20):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, own={"mean": net[0][1].running_mean})
    record.end(
        run.rank,
        weights=dict(net.named_parameters()),
        optimizer=optimizer,
        own={"statistics": dict(net.named_buffers())},
    )


if __name__ == "__main__":
    main()
