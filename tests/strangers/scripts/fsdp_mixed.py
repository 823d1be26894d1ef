"""FSDP2 with mixed precision (bf16 parameters, fp32 reduction), block by block, clipping by the norm over all shards."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS, VOCAB = 20, 32


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=30):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@rackrun.elastic(global_batch_size=12, micro_batch_size=2, seed=41)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = Net().to(run.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = run.loader(TensorDataset(torch.randint(VOCAB, (240, 13), generator=torch.Generator().manual_seed(1))))

    @run.step
    def train_step(step):
        for (tokens,) in data:
            step.backward(F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return step.loss, norm.full_tensor().item()

    for step in run.steps(STEPS):
        loss, norm = train_step(step)
        run.log(loss=loss, norm=norm)
        record.step(run.rank, step, loss=loss, norm=norm)
    record.end(run.rank, schedule=scheduler, own={"shards": dict(model.named_parameters()), "optimizer": optimizer})


if __name__ == "__main__":
    main()
