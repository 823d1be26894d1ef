"""FSDP2: a block leaves the parameter groups for a while, and comes back with the Adam state that it had."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=98)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(2)]
    net = nn.Sequential(nn.Linear(16, 24), *blocks, nn.Linear(24, 4)).to(run.device)
    for block in blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in net], lr=3e-3)
    run.track(model=net, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    @run.step
    def train_step(step):
        block = net[1 + int(step) // 6 % 2]
        if int(step) in (3, 9):
            out = {id(p) for p in block.parameters()}
            optimizer.param_groups[:] = [
                group for group in optimizer.param_groups if not out & {id(p) for p in group["params"]}
            ]
            block.requires_grad_(False)
        if int(step) in (12, 18):
            block.requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3})
        for x, y in data:
            step.backward(F.cross_entropy(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, groups=len(optimizer.param_groups))
        record.step(run.rank, step, {"model": net}, loss=loss, groups=len(optimizer.param_groups))
    record.end(run.rank, {"model": net, "moments": [optimizer.state[p] for p in net.parameters()]})


if __name__ == "__main__":
    main()
