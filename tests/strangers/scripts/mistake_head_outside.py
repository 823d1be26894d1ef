"""ArcFace: the loss has a weight of its own, in the same optimizer as the network, and nobody has wrapped it in DDP."""
# strangers: expect=said

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class ArcFace(nn.Module):
    def __init__(self, width, classes, margin=0.3, scale=8.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))
        self.margin, self.scale = margin, scale

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight)).clamp(-0.999, 0.999)
        target = torch.cos(torch.acos(cosine) + self.margin)
        chosen = F.one_hot(y, len(self.weight)).bool()
        return F.cross_entropy(self.scale * torch.where(chosen, target, cosine), y)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=81)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12)).to(run.device)
    model, criterion = DDP(net), ArcFace(12, 4).to(run.device)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=3e-3)
    run.track(model=model, criterion=criterion, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(criterion(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(20):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=net, own={"criterion": criterion})


if __name__ == "__main__":
    main()
