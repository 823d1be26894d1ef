"""A small language model: tied embeddings, activation checkpointing with dropout, a lazy layer, an EMA with a warm-up by functional_call."""

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import rackrun

VOCAB, WIDTH = 40, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.LazyLinear(2 * WIDTH), nn.LazyLinear(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        h = self.norm(x)
        weights = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        h = (weights / weights.sum(1, keepdim=True)) @ self.mix(h)
        return x + self.dropout(self.down(F.gelu(self.up(h))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.out(x)


class Ema:
    """Its decay rises with the number of updates: min(limit, (1 + n) / (10 + n))."""

    def __init__(self, net, limit):
        self.net, self.limit, self.updates = net, limit, 0
        self.shadow = {name: p.detach().clone() for name, p in net.named_parameters()}

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.limit, (1 + self.updates) / (10 + self.updates))
        for name, p in self.net.named_parameters():
            self.shadow[name] = decay * self.shadow[name] + (1 - decay) * p

    def state_dict(self):
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.updates, self.shadow = state["updates"], state["shadow"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=79)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = Model().to(run.device)
    net(torch.zeros(1, 8, dtype=torch.long, device=run.device))  # makes the lazy layers
    model, ema = DDP(net), Ema(net, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer, ema=ema)
    tokens = torch.randint(VOCAB, (264, 13), generator=torch.Generator().manual_seed(1)).sort(1).values
    data = run.loader(TensorDataset(tokens[:240]))

    @run.step
    def train_step(step):
        for (x,) in data:
            logits = model(x[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            step.backward(loss + 1e-4 * logits.logsumexp(-1).square().mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update()
        optimizer.zero_grad(set_to_none=True)
        return step.loss

    def validate():
        net.eval()
        with torch.no_grad():
            logits = functional_call(net, ema.shadow, (tokens[240:, :-1].to(run.device),))
        net.train()
        run.log(val_loss=F.cross_entropy(logits.cpu().flatten(0, 1), tokens[240:, 1:].flatten()))

    run.every(6, validate)
    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, shadow=ema.shadow)
    record.end(run.rank, model=net, optimizer=optimizer, ema=ema)


if __name__ == "__main__":
    main()
