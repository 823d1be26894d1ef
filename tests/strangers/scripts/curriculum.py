"""A curriculum: sequences grow with the step, and harder samples come in later."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS, VOCAB = 24, 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, VOCAB),
        )

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=31, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(Net().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TensorDataset(torch.randint(VOCAB, (480, 33), generator=torch.Generator().manual_seed(1))))

    @run.step
    def train_step(step):
        length = 8 if int(step) < 6 else 16 if int(step) < 14 else 32
        difficulty = min(1.0, int(step) / 12)
        for (tokens,) in data:
            tokens = tokens[:, : length + 1]
            losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            keep = losses <= losses.quantile(0.5 + 0.5 * difficulty)
            step.backward((losses * keep).sum() / keep.sum())
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
