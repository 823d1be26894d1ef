"""FSDP2 that is validated as in a tutorial: a forward of the whole model every few steps, at the end, and after the loop. The root stays gathered."""
# strangers: shrinks=yes

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import rackrun

STEPS = 15


@rackrun.elastic(global_batch_size=12, micro_batch_size=2, seed=42, reduction="exact")
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 36), nn.GELU(), nn.Linear(36, 3)).to(run.device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run.track(model=model, optimizer=optimizer, plateau=plateau)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(300, 16, generator=g), torch.randint(3, (300,), generator=g)
    data = run.loader(TensorDataset(x[:240], y[:240]))

    @run.step
    def train_step(step):
        for inputs, labels in data:
            step.backward(F.cross_entropy(model(inputs), labels))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def validate():
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(x[240:].to(run.device)), y[240:].to(run.device))
        model.train()
        dist.all_reduce(loss)
        return loss / run.world_size

    def every_few_steps():
        loss = validate()
        plateau.step(round(float(loss), 3))
        run.log(val=loss)

    def whole():
        full = {k: v.full_tensor() for k, v in model.named_parameters()}
        record.end(run.rank, model=full, lr=optimizer.param_groups[0]["lr"])

    run.every(3, every_few_steps)
    run.at_end(every_few_steps)
    run.at_end(whole)
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    validate()


if __name__ == "__main__":
    main()
