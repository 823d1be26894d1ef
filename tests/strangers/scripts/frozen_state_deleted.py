"""Layers are frozen by taking them out of the groups, their Adam state is deleted, and they come back later with none."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 28


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=197)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)]
    net = nn.Sequential(*blocks, nn.Linear(16, 4)).to(run.device)
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in net], lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))

    def freeze(layer):
        out = set(layer.parameters())
        layer.requires_grad_(False)
        for p in out:
            del optimizer.state[p]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in out]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]

    def unfreeze(layer, lr):
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": lr})

    @run.step
    def train_step(step):
        if int(step) in (4, 8):
            freeze(net[int(step) // 4 - 1])
        if int(step) in (14, 19):
            unfreeze(net[1 if int(step) == 14 else 0], 1e-3)
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if int(step) == 23:
            freeze(net[2])
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss, groups=len(optimizer.param_groups))
        record.step(run.rank, step, loss=loss, groups=[len(g["params"]) for g in optimizer.param_groups], model=net)
    moments = [optimizer.state[p] for p in net.parameters()]
    record.end(run.rank, model=net, moments=moments)


if __name__ == "__main__":
    main()
