"""The ordinary GAN loop: a step of the discriminator, then one of the generator, through the updated discriminator."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, STEPS = 8, 24


@rackrun.elastic(global_batch_size=24, micro_batch_size=8, seed=3)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    G = DDP(nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 2)).to(run.device))
    D = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(run.device))
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    run.track(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
    angle = torch.rand(480, generator=torch.Generator().manual_seed(2)) * 6.28
    data = run.loader(TensorDataset(torch.stack([angle.cos(), angle.sin()], 1)))

    @run.step
    def train_step(step):
        errors = {"d": 0.0, "g": 0.0}
        for (real,) in data:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            noise = torch.randn(len(real), Z)

            opt_d.zero_grad()
            fake = G(noise)
            loss_d = F.binary_cross_entropy_with_logits(D(real), ones) + F.binary_cross_entropy_with_logits(
                D(fake.detach()), zeros
            )
            step.backward(loss_d)
            opt_d.step()

            opt_g.zero_grad()
            loss_g = F.binary_cross_entropy_with_logits(D(fake), ones)
            step.backward(loss_g)
            opt_g.step()
            errors["d"] += loss_d.item()
            errors["g"] += loss_g.item()
        return errors

    for step in run.steps(STEPS):
        errors = train_step(step)
        run.log(**errors)
        record.step(run.rank, step, own=errors)
    record.end(run.rank, G=G.module, D=D.module, opt_g=opt_g, opt_d=opt_d)


if __name__ == "__main__":
    main()
