"""A plain loop with Fabric, as its examples have it; the body of the loop is a step. ``FOLDER KILL``: ``STEP:RANK``."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import rackrun
from rackrun.lightning import ElasticFabric

FOLDER, KILL = Path(sys.argv[1]), sys.argv[2]


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=1)
def main(run):
    fabric = Fabric(accelerator="cpu", devices=run.world_size, precision="bf16-mixed", strategy=ElasticFabric(run))
    fabric.launch()
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)))

    @run.step
    def train_step(step):
        for x, y in data:
            fabric.backward(step.scale(mse_loss(model(x).float(), y)))
        if f"{int(step)}:{run.rank}" == KILL and not (FOLDER / "struck").exists():
            (FOLDER / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    @rank_zero_only
    def note(text):
        with open(FOLDER / "main.txt", "a") as file:
            file.write(text)

    for step in run.steps(8, phases=True):
        loss = train_step(step)
        mean = run.phase(lambda: float(fabric.all_reduce(torch.tensor(float(run.rank)))))
        note(f"{step} {loss.hex()} {scheduler.get_last_lr()[0]!r} {mean}\n")
    fabric.barrier()
    weights = {name: value.tolist() for name, value in net.state_dict().items()}
    place = [fabric.global_rank, fabric.world_size, fabric.is_global_zero]
    (FOLDER / f"{run.rank}.json").write_text(json.dumps({"weights": weights, "place": place}))


main()
