"""FSDP2: predictions to look at, from a forward without no_grad and without a backward, before and after the update and in a phase."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS = 18


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=102)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 36), nn.GELU(), nn.Linear(36, 3)).to(run.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(264, 16, generator=g), torch.randint(3, (264,), generator=g)
    data = run.loader(TensorDataset(x[:240], y[:240]))
    shown = x[240:].to(run.device)

    @run.step
    def train_step(step):
        before = model(shown) if int(step) % 3 == 1 else None
        for number, (inputs, labels) in enumerate(data):
            step.backward(F.cross_entropy(model(inputs), labels))
            if int(step) % 3 == 2 and number == 0:
                before = model(shown)
        optimizer.step()
        optimizer.zero_grad()
        after = model(shown)
        return step.loss, (after if before is None else after - before)

    def look():
        run.log(accuracy=(model(shown).argmax(1) == y[240:].to(run.device)).float().mean().item())

    run.every(4, look)
    for step in run.steps(STEPS):
        loss, change = train_step(step)
        run.log(loss=loss, change=change.norm().item())
        record.step(run.rank, step, loss=loss, change=change)
    model.reshard()
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    record.end(run.rank, model=full)


if __name__ == "__main__":
    main()
