"""A moving average of the weights (EMA), which is evaluated in place of the model.

rackrun --standalone --nproc-per-node 3 --spares 1 examples/tasks/ema.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=3)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(run.device))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, average=average, optimizer=optimizer)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs.sin().sum(1, keepdim=True)
    data = run.loader(TensorDataset(inputs, targets))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(mse_loss(model(x), y))
        optimizer.step()
        average.update_parameters(model.module)  # in the step: it is done again with it
        optimizer.zero_grad()
        return step.loss

    def evaluate() -> None:
        with torch.no_grad():
            run.log(average_loss=mse_loss(average(inputs.to(run.device)), targets.to(run.device)).item())

    run.every(4, evaluate)
    for step in run.steps(12):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
