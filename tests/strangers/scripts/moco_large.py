"""Momentum contrast with the queue that papers have: 6 MB of negatives in a buffer, which each rank fills with its own."""
# strangers: ranks=3

import copy
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

DIM, QUEUE, STEPS = 16, 98304, 24


class TwoViews(Dataset):
    def __init__(self):
        self.x = torch.randn(480, 24, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(24), self.x[i] + 0.1 * torch.randn(24)


class MoCo(nn.Module):
    def __init__(self, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.encoder_q = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(DIM, QUEUE), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % QUEUE

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone()
        self.enqueue(k)
        logits = torch.cat([positive, negative], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=11)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(MoCo().to(run.device), broadcast_buffers=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TwoViews())

    @run.step
    def train_step(step):
        for im_q, im_k in data:
            step.backward(model(im_q, im_k))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, query=model.module.encoder_q, own={"key": model.module.encoder_k})

    moco = model.module
    record.end(
        run.rank,
        query=moco.encoder_q,
        optimizer=optimizer,
        own={"key": moco.encoder_k, "queue": moco.queue, "ptr": moco.queue_ptr},
    )


if __name__ == "__main__":
    main()
