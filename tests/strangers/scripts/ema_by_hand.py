"""A language model with a moving average of its weights, kept by hand, with which it is evaluated."""
# strangers: shrinks=yes

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

VOCAB, STEPS = 32, 24


class Text(Dataset):
    def __init__(self, n, seed):
        self.tokens = torch.randint(VOCAB, (n, 13), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens[:, :-1]))
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens[:, 1:].flatten())


class EMA:
    """The class that is in every other repository."""

    def __init__(self, model, decay):
        self.decay = decay
        self.num_updates = 0
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.backup = {}

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for k, v in model.named_parameters():
            self.shadow[k].sub_((1 - decay) * (self.shadow[k] - v))

    def apply_shadow(self, model):
        self.backup = {k: v.detach().clone() for k, v in model.named_parameters()}
        for k, v in model.named_parameters():
            v.data.copy_(self.shadow[k])

    def restore(self, model):
        for k, v in model.named_parameters():
            v.data.copy_(self.backup[k])
        self.backup = {}

    def state_dict(self):
        return {"decay": self.decay, "num_updates": self.num_updates, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay, self.num_updates = state["decay"], state["num_updates"]
        self.shadow = {k: v.clone() for k, v in state["shadow"].items()}


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=21)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(Model().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ema = EMA(model.module, 0.95)
    run.track(model=model, optimizer=optimizer, ema=ema)
    data, valid = run.loader(Text(480, 1)), Text(48, 2)

    @run.step
    def train_step(step):
        for tokens in data:
            step.backward(model(tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model.module)
        return step.loss

    def evaluate():
        ema.apply_shadow(model.module)
        model.eval()
        with torch.no_grad():
            loss = model.module(valid.tokens[run.rank :: run.world_size])
        dist.all_reduce(loss)
        model.train()
        ema.restore(model.module)
        run.log(val_loss=loss.item() / run.world_size)

    run.every(6, evaluate)
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, model=model.module, optimizer=optimizer, ema=ema.shadow, updates=ema.num_updates)


if __name__ == "__main__":
    main()
