"""A loop with Accelerate.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import rackrun
from rackrun.accelerate import follow_ranks


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=1)
def main(run: rackrun.Run) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    follow_ranks(run)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = run.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True)))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            accelerator.backward(step.scale(mse_loss(model(x), y)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(12):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
