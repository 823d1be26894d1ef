"""A GAN of two FSDP2 models in one step; the discriminator is frozen for the generator's part; micro-batches are read first, weights recorded."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

Z, STEPS = 8, 16


def sharded(net, device):
    net = net.to(device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


@rackrun.elastic(global_batch_size=20, micro_batch_size=4, seed=101)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    G = sharded(nn.Sequential(nn.Linear(Z, 24), nn.Tanh(), nn.Linear(24, 6)), run.device)
    D = sharded(nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.1), nn.Linear(24, 1)), run.device)
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    run.track(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(2))
    data = run.loader(TensorDataset(x.cumsum(1)))

    @run.step
    def train_step(step):
        batches = [(real, step.weight) for (real,) in data]

        opt_d.zero_grad()
        for real, weight in batches:
            fake = G(real.repeat(1, 2)[:, :Z]).detach()
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
        record.step(run.rank, step, {"G": G, "D": D}, loss=loss)
    record.end(run.rank, {"G": G, "D": D, "opt_g": opt_g, "opt_d": opt_d})


if __name__ == "__main__":
    main()
