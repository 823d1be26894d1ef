"""Wasserstein GAN with an update of the critic in each micro-batch: which DDP has not reduced yet when there are several of them."""
# strangers: expect=said

import sys

import torch
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

Z, N_CRITIC, CLAMP, STEPS = 6, 3, 0.05, 20


@rackrun.elastic(global_batch_size=36, micro_batch_size=4, seed=9)
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
        for i, (real,) in enumerate(data):
            optimizer_c.zero_grad()
            with torch.no_grad():
                fake = gen.module(torch.randn(len(real), Z))
            step.backward(critic(fake).mean() - critic(real).mean())
            optimizer_c.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-CLAMP, CLAMP)
            if i % N_CRITIC == N_CRITIC - 1:
                optimizer_g.zero_grad()
                for p in critic.parameters():
                    p.requires_grad_(False)
                step.backward(-critic.module(gen(torch.randn(len(real), Z))).mean())
                optimizer_g.step()
                for p in critic.parameters():
                    p.requires_grad_(True)

    for step in run.steps(STEPS):
        train_step(step)
        record.step(run.rank, step, critic=critic.module)
    record.end(run.rank, gen=gen.module, critic=critic.module, optimizer_g=optimizer_g, optimizer_c=optimizer_c)


if __name__ == "__main__":
    main()
