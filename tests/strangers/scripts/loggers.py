"""A CSV of rank 0, Python's logging on all ranks, and a progress bar."""

import csv
import logging
import os
import sys

import torch
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun

STEPS = 24
log = logging.getLogger("train")


class Writer:
    """What SummaryWriter looks like from here."""

    def __init__(self, folder):
        self.file = open(os.path.join(folder, f"metrics-{os.getpid()}.csv"), "a", newline="")
        self.csv = csv.writer(self.file)

    def add_scalar(self, name, value, step):
        self.csv.writerow([step, name, value])
        self.file.flush()


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=29)
def main(run):
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    folder = os.path.dirname(sys.argv[1])
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(360, 12, generator=g), torch.randint(2, (360,), generator=g)))
    writer = None

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(STEPS):
        loss = train_step(step)
        if run.is_main:
            writer = writer or Writer(folder)
            writer.add_scalar("loss", loss, int(step))
            sys.stderr.write(f"\r{int(step) + 1}/{STEPS} [{'#' * (int(step) + 1):{STEPS}}]")
            sys.stderr.flush()
        if int(step) % 8 == 0:
            log.info("rank %d step %d loss %.4f", run.rank, int(step), loss)
        record.step(run.rank, step, loss=loss)
    if run.is_main:  # a rank that is lost between a step and its row leaves that row out; no row may contradict another
        logged = {}
        for name in sorted(os.listdir(folder)):
            if name.startswith("metrics-"):
                with open(os.path.join(folder, name), newline="") as file:
                    for row in csv.reader(file):
                        logged.setdefault(int(row[0]), set()).add(row[2])
        twice = [step for step, values in logged.items() if len(values) > 1]
        record.end(run.rank, own={"contradictions": twice, "first": min(logged), "last": max(logged)})
    record.end(run.rank, model=model.module, optimizer=optimizer)


if __name__ == "__main__":
    main()
