"""A GAN whose discriminator is frozen for the generator's part and called through its DDP wrapper; the weights of the micro-batches are recorded."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, STEPS = 8, 20


@rackrun.elastic(global_batch_size=20, micro_batch_size=4, seed=91)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    G = DDP(nn.Sequential(nn.Linear(Z, 24), nn.Tanh(), nn.Linear(24, 6)).to(run.device))
    D = DDP(nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.1), nn.Linear(24, 1)).to(run.device))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    run.track(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(2))
    data = run.loader(TensorDataset(x.cumsum(1)))

    @run.step
    def train_step(step):
        batches = []
        for (real,) in data:
            batches.append((real, step.weight))

        opt_d.zero_grad()
        for real, weight in batches:
            with torch.no_grad():
                fake = G(real.flip(1).repeat(1, 2)[:, :Z])
            step.backward(F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean(), weight=weight)
        opt_d.step()

        D.requires_grad_(False)
        opt_g.zero_grad()
        for real, weight in batches:
            step.backward(F.softplus(-D(G(real.repeat(1, 2)[:, :Z]))).mean(), weight=weight)
        opt_g.step()
        D.requires_grad_(True)
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, G=G.module, D=D.module)
    record.end(run.rank, G=G.module, D=D.module, opt_g=opt_g, opt_d=opt_d)


if __name__ == "__main__":
    main()
