"""A GAN: two models and two optimizers in one step.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/gan.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=4)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)).to(run.device))
    critic = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(run.device), broadcast_buffers=False)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.track(generator=generator, critic=critic, of_generator=of_generator, of_critic=of_critic)
    data = run.loader(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) + 2.0))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        batches = [(real, torch.randn(len(real), 2, device=run.device)) for (real,) in data]
        for real, noise in batches:
            made, known = critic(generator(noise).detach()), critic(real)
            loss = bce(known, torch.ones_like(known)) + bce(made, torch.zeros_like(made))
            (step.gradient_scale * loss).backward()
        of_critic.step()  # what follows makes this a step of parts: its gate stands at the end
        of_critic.zero_grad()
        total = torch.zeros((), device=run.device)
        for _, noise in batches:
            made = critic(generator(noise))
            loss = bce(made, torch.ones_like(made))
            (step.gradient_scale * loss).backward()
            total += step.gradient_scale * loss.detach()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        dist.all_reduce(total)
        return total.item() / run.world_size

    for step in run.steps(12):
        run.log(generator_loss=train_step(step))


if __name__ == "__main__":
    main()
