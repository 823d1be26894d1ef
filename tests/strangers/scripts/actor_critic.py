"""Reinforcement learning: a rollout as a phase, then steps of two kinds, until the reward is good enough; no step numbers."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Progress:
    def __init__(self):
        self.rewards, self.rounds = [], 0

    def state_dict(self):
        return {"rewards": list(self.rewards), "rounds": self.rounds}

    def load_state_dict(self, state):
        self.rewards, self.rounds = list(state["rewards"]), state["rounds"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=12)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    actor = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(run.device))
    critic = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(run.device))
    opt_a = torch.optim.Adam(actor.parameters(), lr=3e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    progress = Progress()
    run.track(actor=actor, critic=critic, opt_a=opt_a, opt_c=opt_c, progress=progress)
    g = torch.Generator().manual_seed(1)
    states = torch.randn(240, 4, generator=g)
    data = run.loader(TensorDataset(states))

    def rollout():
        """All ranks play some states each, and agree on the mean reward."""
        mine = torch.randn(6, 4)
        with torch.no_grad():
            actions = actor(mine).argmax(1)
        reward = (actions == (mine.sum(1) > 0).long()).double().mean()
        dist.all_reduce(reward)
        progress.rewards.append(float(reward) / run.world_size)
        progress.rounds += 1
        return progress.rewards[-1]

    def update_critic(step, weight):
        for (batch,) in data:
            loss = weight * F.mse_loss(critic(batch).squeeze(1), batch.sum(1))
            step.backward(loss)
        opt_c.step()
        opt_c.zero_grad()
        return step.loss

    def update_actor(step):
        for (batch,) in data:
            step.backward(F.cross_entropy(actor(batch), (batch.sum(1) > 0).long()))
        nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        opt_a.step()
        opt_a.zero_grad()
        return step.loss

    def note(step, loss):
        if loss is not None:  # else this process has taken over later
            record.step(run.rank, step, loss=loss)

    step = 0
    while run.goes_on(lambda: progress.rounds < 4 or (sum(progress.rewards[-3:]) < 2.9 and progress.rounds < 9)):
        run.phase(rollout)
        for weight in (1.0, 0.5):
            note(step, run.do(update_critic, weight))
            step += 1
        note(step, run.do(update_actor))
        step += 1
    record.end(run.rank, actor=actor.module, critic=critic.module, opt_a=opt_a, opt_c=opt_c, rewards=progress.rewards)


if __name__ == "__main__":
    main()
