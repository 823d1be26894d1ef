"""FSDP2: the blocks are unfrozen one after the other, from the top, each in a parameter group of its own."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS, EACH = 24, 6


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=82)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(3)]
    net = nn.Sequential(nn.Linear(16, 24), *blocks, nn.Linear(24, 4)).to(run.device)
    net[:4].requires_grad_(False)
    for block in blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net[4].parameters(), lr=1e-2)
    run.track(model=net, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        number, rest = divmod(int(step), EACH)
        if number and not rest:
            block = net[4 - number]
            block.requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-2 / 2**number})
        for x, y in data:
            step.backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, groups=len(optimizer.param_groups))
        record.step(run.rank, step, loss=loss, groups=len(optimizer.param_groups))
    record.end(run.rank, {"model": net, "optimizer": optimizer})


if __name__ == "__main__":
    main()
