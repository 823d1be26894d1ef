"""No DDP: hooks reduce each gradient as soon as it is there, handles are waited for before the update; metrics reduced by futures and never waited for."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import Record
from torch import nn
from torch.utils.data import TensorDataset

import rackrun


@rackrun.elastic(global_batch_size=24, micro_batch_size=4, seed=21)
def main(run):
    record = Record(sys.argv[1])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run.track(model=net, optimizer=optimizer)
    g = torch.Generator().manual_seed(1)
    data = run.loader(TensorDataset(torch.randn(240, 16, generator=g), torch.randint(4, (240,), generator=g)))
    handles, now = [], {"last": False}

    def reduce(parameter):
        if now["last"]:
            handles.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)

    @run.step
    def train_step(step):
        handles.clear()
        last = len(data) - 1
        for i, (x, y) in enumerate(data):
            now["last"] = i == last
            step.backward(F.cross_entropy(net(x), y))
            dist.all_reduce(x.mean(0), op=dist.ReduceOp.MAX, async_op=True)
        count = (
            dist.all_reduce(torch.ones(3, device=run.device), async_op=True).get_future().then(lambda f: f.value()[0])
        )
        for handle in reversed(handles):
            handle.wait()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return step.loss, norm, count.wait()

    for step in run.steps(16):
        loss, norm, count = train_step(step)
        run.log(loss=loss)
        record.step(run.rank, step, loss=loss, norm=norm, count=count)
    record.end(run.rank, model=net, optimizer=optimizer)


if __name__ == "__main__":
    main()
