"""PPO in small: a rollout of an environment with its own numpy generator, then several epochs of updates within one step."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Environment:
    """A point that is to be brought to the middle. Every rank plays its own."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.at, self.mean, self.spread = self.rng.normal(size=4), np.zeros(4), 1.0

    def act(self, action):
        self.at = 0.9 * self.at + 0.3 * (action - 1) + 0.1 * self.rng.normal(size=4)
        self.mean = 0.99 * self.mean + 0.01 * self.at
        self.spread = 0.99 * self.spread + 0.01 * float(np.abs(self.at - self.mean).mean())
        return self.seen(), -float(np.abs(self.at).sum())

    def seen(self):
        return torch.tensor((self.at - self.mean) / (self.spread + 1e-6), dtype=torch.float32)

    def state_dict(self):
        state = self.rng.bit_generator.state
        words = {k: str(v) for k, v in state["state"].items()}
        return {"at": self.at.tolist(), "mean": self.mean.tolist(), "spread": self.spread, "rng": words}

    def load_state_dict(self, state):
        self.at, self.mean, self.spread = np.array(state["at"]), np.array(state["mean"]), state["spread"]
        words = {k: int(v) for k, v in state["rng"].items()}
        self.rng.bit_generator.state = {**self.rng.bit_generator.state, "state": words}


@rackrun.elastic(global_batch_size=12, micro_batch_size=4, seed=42)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    environment = Environment(7)
    run.track(model=model, optimizer=optimizer, environment=environment)
    data = run.loader(TensorDataset(torch.arange(120)))

    def play(count):
        rows = []
        seen = environment.seen()
        for _ in range(count):
            with torch.no_grad():
                logits = model.module(seen)[:3]
                action = torch.multinomial(logits.softmax(-1), 1)
            following, reward = environment.act(action.item())
            rows.append((seen, action, logits.log_softmax(-1)[action], torch.tensor([reward])))
            seen = following
        return [torch.stack(column) for column in zip(*rows)]

    @run.step
    def train_step(step):
        batches = [play(len(ids)) for (ids,) in data]
        for _ in range(3):
            for seen, action, old, reward in batches:
                out = model(seen)
                now = out[:, :3].log_softmax(-1).gather(1, action)
                advantage = reward - out[:, 3:].detach()
                ratio = (now - old).exp()
                policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = policy + 0.5 * F.mse_loss(out[:, 3:], reward)
                (step.gradient_scale * loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    for step in run.steps(20):
        loss = train_step(step)
        record.step(run.rank, step, own={"loss": loss, "environment": environment})
    record.end(run.rank, model=model.module, optimizer=optimizer, own={"environment": environment})


if __name__ == "__main__":
    main()
