"""FSDP2 and tensor parallelism: pairs of ranks share each layer, and the pairs share the data.

rackrun --standalone --nproc-per-node 5 --spares 1 examples/tasks/tensor_parallel.py
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rackrun


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.down(self.up(x).relu()))
        return found


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=6, mesh={"dp": -1, "tp": 2}, snapshot_every=4)
def main(run: rackrun.Run) -> None:
    torch.manual_seed(0)
    model = Net().to(run.device)
    parallelize_module(model, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=run.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    data = run.loader(TensorDataset(inputs, inputs[:, :4].argmax(1)))

    @run.step
    def train_step(step: rackrun.Step) -> float:
        for x, y in data:
            step.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(12):
        run.log(loss=train_step(step))


if __name__ == "__main__":
    main()
