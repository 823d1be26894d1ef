"""Loops whose body logs and calls phases. ``FOLDER KIND KILL``: KIND is ``steps`` or ``do``; KILL ``PLACE:STEP:RANK``, once, or "" for nobody."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rackrun

FOLDER, KIND, KILL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
STEPS = 12


class Done:
    """How many phases were run; a tracked object."""

    def __init__(self):
        self.phases = 0

    def state_dict(self):
        return {"phases": self.phases}

    def load_state_dict(self, state):
        self.phases = state["phases"]


@rackrun.elastic(global_batch_size=8, micro_batch_size=2, seed=1)
def main(run):
    def strike(place, step):
        if f"{place}:{step}:{run.rank}" == KILL and not (FOLDER / "struck").exists():
            (FOLDER / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model, done = DDP(nn.Linear(4, 1)), Done()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer, done=done)
    data = run.loader(list(torch.randn(32, 4, generator=torch.Generator().manual_seed(0))))

    def train(step):
        for batch in data:
            step.backward(model(batch).pow(2).mean())
        strike("step", int(step))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate(step):
        total = torch.tensor([1.0])
        strike("phase", step)
        dist.all_reduce(total)
        done.phases += 1
        return total.item() * step

    def turn(step, loss):
        run.log(loss=loss)
        run.log(metric=run.phase(lambda: evaluate(step)))
        strike("body", step)
        run.log(end=step)

    if KIND == "steps":
        train_step = run.step(train)
        for step in run.steps(STEPS, phases=True):
            run.log(begin=step)
            turn(step, train_step(step))
    else:
        step = 0
        while run.goes_on(lambda: done.phases < STEPS):
            run.log(begin=step)
            turn(step, run.do(train))
            step += 1


main()
