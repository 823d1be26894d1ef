"""A GAN that updates both models for every micro-batch; the discriminator, in DDP with find_unused_parameters, is frozen while it judges the generator."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, STEPS = 8, 20


def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag


@rackrun.elastic(global_batch_size=24, micro_batch_size=8, seed=92)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    G = DDP(nn.Sequential(nn.Linear(Z, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 6)).to(run.device))
    first = nn.utils.spectral_norm(nn.Linear(6, 24))
    net_d = nn.Sequential(first, nn.LeakyReLU(0.1), nn.Dropout(0.1), nn.Linear(24, 1))
    D = DDP(net_d.to(run.device), find_unused_parameters=True)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    run.track(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(2))
    data = run.loader(TensorDataset(x.cumsum(1)))

    @run.step
    def train_step(step):
        for (real,) in data:
            fake = G(torch.randn(len(real), Z))

            set_requires_grad(D, False)
            opt_g.zero_grad()
            step.backward(F.softplus(-D(fake)).mean())
            opt_g.step()

            set_requires_grad(D, True)
            opt_d.zero_grad()
            loss = (F.softplus(-D(real)) + F.softplus(D(fake.detach()))).mean()
            step.backward(loss)
            opt_d.step()
        return loss.item()

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, {"loss": loss}, weights=[list(G.parameters()), list(D.parameters())])
    record.end(run.rank, {"G": G.module, "D": D.module}, opt_g=opt_g, opt_d=opt_d)


if __name__ == "__main__":
    main()
