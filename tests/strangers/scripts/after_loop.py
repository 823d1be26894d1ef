"""What comes after the loop: a last evaluation with a reduction, a barrier, and a save by rank 0."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=40)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)
    data = run.loader(TensorDataset(x, y))

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

    net.eval()
    rows = slice(run.rank, None, run.world_size)
    with torch.no_grad():
        correct = (net(x[rows]).argmax(1) == y[rows]).sum().float()
    dist.all_reduce(correct)
    if run.rank == 0:
        path = os.path.join(os.path.dirname(sys.argv[1]), "final.pt")
        torch.save(net.state_dict(), path)
        print(f"accuracy {correct.item() / len(x):.3f}", flush=True)
    dist.barrier()
    record.end(run.rank, model=net, optimizer=optimizer, correct=correct)


if __name__ == "__main__":
    main()
