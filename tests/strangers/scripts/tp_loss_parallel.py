"""A head that is cut by classes, and a loss over it that stays cut (loss_parallel): the loss is a DTensor. Data parallelism by fully_shard, plain SGD."""
# strangers: ranks=4

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import TensorDataset

import rackrun


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(x + self.down(F.relu(self.up(x))))


@rackrun.elastic(global_batch_size=16, micro_batch_size=4, seed=44, mesh={"dp": -1, "tp": 2})
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = MLP().to(run.device)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head})
    fully_shard(model, mesh=run.mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(320, 16, generator=g), torch.randint(4, (320,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            with loss_parallel():
                step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(16):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, own={"shards": dict(model.named_parameters()), "optimizer": optimizer})


if __name__ == "__main__":
    main()
