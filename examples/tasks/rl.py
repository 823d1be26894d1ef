"""Reinforcement learning: rollouts in a phase, then several updates, each a step of its own (`run.do`).

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/rl.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

ARMS, PLAYED = 4, 32


class Rollout:
    """What was played last, and how often was played: a tracked object, so a process that takes a rank over has it."""

    def __init__(self) -> None:
        self.actions, self.rewards = torch.zeros(PLAYED, dtype=torch.long), torch.zeros(PLAYED)
        self.turns = 0

    def state_dict(self) -> dict[str, Any]:
        return {"actions": self.actions, "rewards": self.rewards, "turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actions, self.rewards, self.turns = state["actions"], state["rewards"], state["turns"]


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=5)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(0)
    policy = DDP(nn.Linear(1, ARMS, bias=False).to(run.device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    rollout = Rollout()
    run.track(policy=policy, optimizer=optimizer, rollout=rollout)
    data = run.loader(TensorDataset(torch.arange(PLAYED)))

    def logits(count: int) -> Tensor:
        found: Tensor = policy(torch.ones(count, 1, device=run.device))
        return found

    def play() -> None:
        """Every rank plays the same: the generator is seeded by the turn."""
        drawn = torch.Generator().manual_seed(rollout.turns)
        with torch.no_grad():
            chances = policy.module(torch.ones(1, 1, device=run.device)).softmax(-1).cpu()[0]
        rollout.actions = torch.multinomial(chances, PLAYED, replacement=True, generator=drawn)
        rollout.rewards = rollout.actions.float() + torch.randn(PLAYED, generator=drawn)
        rollout.turns += 1

    def update(step: rackrun.Step) -> float:
        for (indices,) in data:
            actions = rollout.actions[indices.cpu()].to(run.device)
            advantage = (rollout.rewards[indices.cpu()] - rollout.rewards.mean()).to(run.device)
            chosen = logits(len(indices)).log_softmax(-1).gather(1, actions[:, None])[:, 0]
            step.backward(-(chosen * advantage).mean())
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for _ in range(4):
        run.phase(play)
        for _ in range(3):
            run.log(loss=run.do(update))


if __name__ == "__main__":
    main()
