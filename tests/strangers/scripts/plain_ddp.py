"""DDP as in the tutorial, a torch.save every few steps, a resume: it knows nothing of rackrun, and is started again after a failure."""
# strangers: plain=yes

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 6


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    record = Record(sys.argv[1])
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Else DDP lays its buckets out anew after the first backward of every start, and adds in another order in that one than in a run that goes on.
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(96, 16, generator=g), torch.randint(4, (96,), generator=g))
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    path, first = os.path.join(os.path.dirname(sys.argv[1]), "latest.pt"), 0
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            record.step(rank, epoch * len(loader) + i, own={"loss": loss.item()})
        if rank == 0:
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path + ".tmp"
            )
            os.replace(path + ".tmp", path)
        dist.barrier()
    record.end(rank, model=model.module, optimizer=optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
