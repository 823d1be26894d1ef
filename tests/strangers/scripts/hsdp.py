"""HSDP: shards in pairs, replicas across them."""
# strangers: ranks=4

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=16, micro_batch_size=2, seed=43, mesh={"dp_replicate": -1, "dp_shard": 2})
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(run.device)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(320, 16, generator=g), torch.randint(4, (320,), generator=g)))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(20):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, own={"shards": dict(model.named_parameters()), "optimizer": optimizer})


if __name__ == "__main__":
    main()
