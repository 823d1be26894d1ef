"""Wasserstein GAN: every step trains the critic and clamps its weights; every third trains the generator too."""

import sys

import torch
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, N_CRITIC, CLAMP, STEPS = 6, 3, 0.05, 24


@rackrun.elastic(global_batch_size=24, micro_batch_size=8, seed=9)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    gen = DDP(nn.Sequential(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    critic = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)).to(run.device))
    optimizer_g = torch.optim.RMSprop(gen.parameters(), lr=5e-4)
    optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    run.track(gen=gen, critic=critic, optimizer_g=optimizer_g, optimizer_c=optimizer_c)
    data = run.loader(TensorDataset(torch.randn(720, 4, generator=torch.Generator().manual_seed(1)).abs()))

    @run.step
    def train_step(step):
        for (real,) in data:
            optimizer_c.zero_grad()
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), Z))
            distance = critic(real).mean() - critic.module(fake).mean()
            step.backward(-distance)
        optimizer_c.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-CLAMP, CLAMP)
        if int(step) % N_CRITIC == N_CRITIC - 1:
            optimizer_g.zero_grad()
            critic.requires_grad_(False)
            step.backward(-critic.module(gen(torch.randn(8, Z))).mean())
            critic.requires_grad_(True)
            optimizer_g.step()
        return distance.item()

    for step in run.steps(STEPS):
        distance = train_step(step)
        record.step(run.rank, step, own={"distance": distance}, critic=critic.module)
    record.end(run.rank, gen=gen.module, critic=critic.module, optimizer_g=optimizer_g, optimizer_c=optimizer_c)


if __name__ == "__main__":
    main()
