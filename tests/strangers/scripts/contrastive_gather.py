"""CLIP in small: two towers, features of all ranks gathered with their gradients, a learned temperature that is clamped after the update."""

import math
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distf
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(5 * 16, 16))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def clip_loss(image, text, scale):
    images, texts = torch.cat(distf.all_gather(image)), torch.cat(distf.all_gather(text))
    labels = torch.arange(len(image), device=image.device) + len(image) * dist.get_rank()
    return (F.cross_entropy(scale * image @ texts.T, labels) + F.cross_entropy(scale * text @ images.T, labels)) / 2


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=72)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = Towers().to(run.device)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 24, generator=g), torch.randint(50, (240, 5), generator=g)))

    @run.step
    def train_step(step):
        for image, text in data:
            step.backward(clip_loss(*model(image, text)))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, math.log(100))
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss, scale=net.logit_scale.exp().item())
        record.step(run.rank, step, loss=loss, scale=net.logit_scale)
    record.end(run.rank, model=net, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
