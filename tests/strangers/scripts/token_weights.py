"""Sequences of different length: each micro-batch weighs as many tokens as it has, out of those of all ranks (reduced before the update)."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import rackrun

STEPS, VOCAB = 20, 20


class Sentences(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 24, (360,), generator=g)
        self.rows = [torch.randint(1, VOCAB, (int(n),), generator=g) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    return pad_sequence(rows, batch_first=True)


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=32)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCAB, 16, padding_idx=0), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, VOCAB))
    model = DDP(net.to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Sentences(), collate=collate)

    @run.step
    def train_step(step):
        batches = list(data)
        tokens = torch.tensor(float(sum(int((b[:, 1:] > 0).sum()) for b in batches)))
        dist.all_reduce(tokens)
        for b in batches:
            here = int((b[:, 1:] > 0).sum())
            loss = F.cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten(), ignore_index=0)
            step.backward(loss, weight=here / float(tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, int(tokens)

    for step in run.steps(STEPS):
        loss, tokens = train_step(step)
        run.log(loss=loss, tokens=tokens)
        record.step(run.rank, step, loss=loss, tokens=tokens)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
