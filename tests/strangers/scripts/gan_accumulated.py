"""A GAN with several micro-batches a step: first all of the discriminator's, its update, then all of the generator's."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, STEPS = 8, 20


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=4)
def main(run):
    record = Record(sys.argv[1])
    generator = DDP(nn.Sequential(nn.Linear(Z, 24), nn.Tanh(), nn.Linear(24, 6)).to(run.device))
    discriminator = DDP(nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.1), nn.Linear(24, 1)).to(run.device))
    d_optimizer = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    g_scheduler = torch.optim.lr_scheduler.LinearLR(g_optimizer, 1.0, 0.1, STEPS)
    run.track(generator=generator, discriminator=discriminator, d=d_optimizer, g=g_optimizer, schedule=g_scheduler)
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(2))
    data = run.loader(TensorDataset(x.cumsum(1)))

    @run.step
    def train_step(step):
        batches = [batch for (batch,) in data]
        for p in generator.parameters():
            p.requires_grad_(False)
        for real in batches:
            fake = generator(torch.randn(len(real), Z))
            step.backward(F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean())
        d_optimizer.step()
        d_optimizer.zero_grad()
        for p in generator.parameters():
            p.requires_grad_(True)

        for p in discriminator.parameters():
            p.requires_grad_(False)
        for real in batches:
            step.backward(F.softplus(-discriminator(generator(torch.randn(len(real), Z)))).mean())
        g_optimizer.step()
        g_optimizer.zero_grad()
        g_scheduler.step()
        for p in discriminator.parameters():
            p.requires_grad_(True)

    for step in run.steps(STEPS):
        train_step(step)
        run.log(lr=g_optimizer.param_groups[0]["lr"])
        record.step(run.rank, step, generator=generator.module, discriminator=discriminator.module)
    record.end(run.rank, G=generator.module, D=discriminator.module, d=d_optimizer, g=g_optimizer, schedule=g_scheduler)


if __name__ == "__main__":
    main()
