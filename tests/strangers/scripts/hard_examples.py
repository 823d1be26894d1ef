"""Hard-example mining: a table of each sample's last loss, gathered from all ranks, weighs the samples of later steps."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun


class Indexed(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(n, 16, generator=g), torch.randint(4, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


class Hardness:
    def __init__(self, n):
        self.last = torch.full((n,), 1.4)
        self.rounds = {}

    def weights(self, ids):
        w = self.last[ids].exp()
        return w / w.mean()

    def update(self, ids, losses):
        mine = torch.stack([torch.cat(ids).double(), torch.cat(losses).double()])
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        for theirs in everybody:
            self.last[theirs[0].long()] = theirs[1].float()
            for i in theirs[0].long().tolist():
                self.rounds[i] = self.rounds.get(i, 0) + 1

    def state_dict(self):
        return {"last": self.last, "rounds": dict(self.rounds)}

    def load_state_dict(self, state):
        self.last.copy_(state["last"])
        self.rounds = dict(state["rounds"])


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=80)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    hardness = Hardness(96)
    run.track(model=model, optimizer=optimizer, hardness=hardness)
    data = run.loader(Indexed(96))

    @run.step
    def train_step(step):
        ids, losses = [], []
        for i, x, y in data:
            each = F.cross_entropy(model(x), y, reduction="none")
            step.backward((hardness.weights(i.cpu()).to(each.device) * each).mean())
            ids.append(i.cpu())
            losses.append(each.detach().cpu())
        optimizer.step()
        hardness.update(ids, losses)
        optimizer.zero_grad()
        return step.loss

    for step in run.steps(24):
        loss = train_step(step)
        run.log(loss=loss, hardest=hardness.last.max().item())
        record.step(run.rank, step, loss=loss, table=hardness.last)
    record.end(run.rank, model=model.module, optimizer=optimizer, hardness=hardness)


if __name__ == "__main__":
    main()
