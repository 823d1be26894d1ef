"""bf16 autocast, a transformer block with dropout, fused AdamW, a cosine schedule."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS, VOCAB = 20, 40


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))


@rackrun.elastic(global_batch_size=12, micro_batch_size=2, seed=1)
def main(run):
    record = Record(sys.argv[1])
    model = DDP(Tiny().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = run.loader(TensorDataset(torch.randint(VOCAB, (240, 17), generator=torch.Generator().manual_seed(0))))

    @run.step
    def train_step(step):
        for (tokens,) in data:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
            step.backward(F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
