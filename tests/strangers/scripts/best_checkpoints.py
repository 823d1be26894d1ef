"""The best three checkpoints by validation, kept by hand in a phase (a metric object with a reduction of its own), and their average at the end."""

import heapq
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


class Accuracy:
    """As torchmetrics has it: update, compute, reset."""

    def __init__(self):
        self.right, self.seen = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)

    def update(self, logits, y):
        self.right += (logits.argmax(1) == y).sum().cpu()
        self.seen += len(y)

    def compute(self):
        both = torch.stack([self.right, self.seen])
        dist.all_reduce(both)
        return both[0].item() / both[1].item()

    def reset(self):
        self.right.zero_()
        self.seen.zero_()


class Best:
    def __init__(self, folder, keep):
        self.folder, self.keep, self.heap, self.number = folder, keep, [], 0

    def offer(self, model, score, write):
        self.number += 1
        path = str(self.folder / f"{self.number:03}.pt")
        if write:
            torch.save(model.state_dict(), path + ".tmp")
            os.replace(path + ".tmp", path)
        heapq.heappush(self.heap, (score, path))
        if len(self.heap) > self.keep:
            _, worst = heapq.heappop(self.heap)
            if write:
                Path(worst).unlink(missing_ok=True)

    def state_dict(self):
        return {"heap": self.heap, "number": self.number}

    def load_state_dict(self, state):
        self.heap, self.number = [tuple(entry) for entry in state["heap"]], state["number"]


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=78)
def main(run):
    record = Record(sys.argv[1])
    folder = Path(sys.argv[1]).with_name("best")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    model = DDP(net)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    best, accuracy = Best(folder, 3), Accuracy()
    run.track(model=model, optimizer=optimizer, best=best)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(480, 16, generator=g)
    y = (x[:, :4] + 0.5 * torch.randn(480, 4, generator=g)).argmax(1)
    data = run.loader(TensorDataset(x[:360], y[:360]))

    @run.step
    def train_step(step):
        for x, y in data:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def validate():
        net.eval()
        accuracy.reset()
        with torch.no_grad():
            for i in range(360 + run.rank * 8, 480, run.world_size * 8):
                accuracy.update(net(x[i : i + 8].to(run.device)), y[i : i + 8].to(run.device))
        score = accuracy.compute()
        net.train()
        best.offer(net, score, run.is_main)
        run.log(accuracy=score)

    run.every(3, validate)
    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss)
    scores = sorted(best.heap)
    dist.barrier()
    states = [torch.load(path) for _, path in scores]
    soup = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
    record.end(run.rank, scores=[score for score, _ in scores], soup=soup, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
