"""DQN on a toy corridor: an environment, a replay buffer, epsilon-greedy play in each step, a target network copied now and then."""

import copy
import random
import sys
from collections import deque

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

LENGTH, STEPS = 8, 24


class Corridor:
    """Walk right to the end. State: where one is."""

    def __init__(self):
        self.position, self.steps, self.episodes = 0, 0, 0

    def act(self, action):
        self.steps += 1
        self.position = max(0, min(LENGTH - 1, self.position + (1 if action else -1)))
        done = self.position == LENGTH - 1 or self.steps >= 30
        reward = 1.0 if self.position == LENGTH - 1 else -0.01
        if done:
            self.position, self.steps, self.episodes = 0, 0, self.episodes + 1
        return reward, done

    def state_dict(self):
        return {"position": self.position, "steps": self.steps, "episodes": self.episodes}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Replay:
    def __init__(self, capacity=200):
        self.rows = deque(maxlen=capacity)

    def push(self, row):
        self.rows.append(row)

    def sample(self, n):
        return [torch.tensor(column) for column in zip(*random.sample(list(self.rows), n))]

    def state_dict(self):
        return {"rows": list(self.rows)}

    def load_state_dict(self, state):
        self.rows.clear()
        self.rows.extend(tuple(row) for row in state["rows"])


def one_hot(positions):
    return F.one_hot(torch.as_tensor(positions), LENGTH).float()


@rackrun.elastic(global_batch_size=3, micro_batch_size=1, seed=38)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(LENGTH, 24), nn.ReLU(), nn.Linear(24, 2)).to(run.device)
    q, target = DDP(net), copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-2)
    env, replay = Corridor(), Replay()
    run.track(q=q, target=target, optimizer=optimizer, env=env, replay=replay)
    data = run.loader(TensorDataset(torch.arange(3000)))  # one seed of play for each rank and step

    @run.step
    def train_step(step):
        epsilon = max(0.1, 1.0 - int(step) / 15)
        for _ in data:
            for _ in range(20):
                position = env.position
                action = random.randint(0, 1) if random.random() < epsilon else int(net(one_hot([position])).argmax())
                reward, done = env.act(action)
                replay.push((position, action, reward, env.position, float(done)))
            s, a, r, s2, done = replay.sample(16)
            with torch.no_grad():
                aim = r + 0.95 * (1 - done) * target(one_hot(s2)).max(1).values
            step.backward(F.mse_loss(q(one_hot(s)).gather(1, a[:, None]).squeeze(1), aim))
        optimizer.step()
        optimizer.zero_grad()
        if int(step) % 5 == 4:
            target.load_state_dict(net.state_dict())
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, episodes=env.episodes)
        record.step(run.rank, step, loss=loss, own={"at": [env.position, env.episodes, len(replay.rows)]})
    record.end(run.rank, q=net, target=target, optimizer=optimizer, own={"env": env, "replay": replay})


if __name__ == "__main__":
    main()
