"""A frozen teacher with BatchNorm in eval mode, a student, and a temperature that falls."""
# strangers: shrinks=yes

import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=37)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 6)).to(run.device)
    with torch.no_grad():  # what a checkpoint of it would bring
        for _ in range(5):
            teacher(torch.randn(32, 16))
    teacher.eval().requires_grad_(False)
    student = DDP(nn.Sequential(nn.Linear(16, 16), nn.Hardswish(), nn.Linear(16, 6)).to(run.device))
    optimizer = torch.optim.RAdam(student.parameters(), lr=5e-3)
    run.track(student=student, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 16, generator=g), torch.randint(6, (360,), generator=g)))

    @run.step
    def train_step(step):
        temperature = 4.0 - 3.0 * int(step) / STEPS
        for x, y in data:
            with torch.no_grad():
                soft = F.softmax(teacher(x) / temperature, -1)
            out = student(x)
            kd = F.kl_div(F.log_softmax(out / temperature, -1), soft, reduction="batchmean") * temperature**2
            step.backward(0.7 * kd + 0.3 * F.cross_entropy(out, y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    record.end(run.rank, student=student.module, teacher=teacher, optimizer=optimizer)


if __name__ == "__main__":
    main()
