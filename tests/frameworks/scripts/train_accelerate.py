"""A plain loop with Accelerate, as its examples have it; the body of the loop is a step. ``FOLDER KILL``: ``STEP:RANK``."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import rackrun
from rackrun.accelerate import follow_ranks

FOLDER, KILL = Path(sys.argv[1]), sys.argv[2]


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=1)
def main(run):
    accelerator = Accelerator(cpu=True)
    follow_ranks(run)
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)))

    @run.step
    def train_step(step):
        for x, y in data:
            accelerator.backward(step.scale(mse_loss(model(x), y)))
        if f"{int(step)}:{run.rank}" == KILL and not (FOLDER / "struck").exists():
            (FOLDER / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    losses = {}
    for step in run.steps(8):
        losses[step] = train_step(step)
        if accelerator.is_main_process:
            with open(FOLDER / "main.txt", "a") as file:
                file.write(f"{step} {losses[step].hex()} {scheduler.get_last_lr()[0]!r}\n")
    accelerator.wait_for_everyone()
    weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    place = [accelerator.process_index, accelerator.num_processes, accelerator.is_main_process]
    (FOLDER / f"{run.rank}.json").write_text(json.dumps({"weights": weights, "place": place}))


main()
