"""Two pipeline stages: the first half of the model on some ranks, the second half on others.

rackrun --standalone --nproc-per-node 5 --spares 1 examples/tasks/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

WIDTH = 16


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=7, mesh={"dp": -1, "pp": 2}, snapshot_every=4)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(run.rank)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))  # of one shape, for any stage
    model = DDP(part.to(run.device), process_group=run.mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    inputs = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(inputs, inputs[:, :4].argmax(1)))

    @run.step
    def train_step(step: rackrun.Step) -> None:
        pipeline = run.mesh["pp"]
        stage = pipeline.get_local_rank()  # asked in the step: a spare learns its stage when it takes a rank over
        other = dist.get_global_rank(pipeline.get_group(), 1 - stage)
        for x, y in data:
            weight = step.weight  # of this micro-batch in the global batch: the last stage weights the loss for both
            if stage == 0:
                hidden = model(x)
                dist.send(hidden.detach(), other)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, other)
                hidden.backward(gradient)
            else:
                hidden = torch.empty(len(x), WIDTH, device=run.device)
                dist.recv(hidden, other)
                hidden.requires_grad_(True)
                step.backward(cross_entropy(model(hidden)[:, :4], y), weight=weight)
                assert hidden.grad is not None
                dist.send(hidden.grad, other)
        optimizer.step()
        optimizer.zero_grad()

    for step in run.steps(12):
        train_step(step)


if __name__ == "__main__":
    main()
