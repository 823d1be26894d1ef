"""A pipeline of one stage a rank, by 1F1B, that strikes itself and writes down what it computes, as ``train.py`` does.

Each stage runs as many forward passes ahead as there are stages behind it, then one backward pass for each forward pass, then the rest: activations go
down and gradients up in batches of sends and receives. A rank is its stage; nobody has a copy of its shard, so a lost one comes from a snapshot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import rackrun

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Record, Strikes, digest_of, doubled, numbers, show_stacks_in_time

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--record", required=True)
parser.add_argument("--strikes", default="[]")
parser.add_argument("--flags", type=Path, required=True)
parser.add_argument("--width", type=int, default=64)
parser.add_argument(
    "--chunks", type=int, default=6, help="of a micro-batch, that are in the pipeline one behind another"
)
parser.add_argument("--rows", type=int, default=4, help="of a chunk")
ARGS = parser.parse_args()


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self) -> None:
        self.x = torch.randn(4096, ARGS.width, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.x[index].sin(), index


class Stage:
    """``part`` of a model, between the ranks before and after it."""

    def __init__(self, part: nn.Module, run: rackrun.Run) -> None:
        self._part, self._run, self._device = part, run, run.device

    @property
    def _rank(self) -> int:
        """Asked when it is needed: a spare comes to know it when it takes a rank over."""
        return self._run.rank

    @property
    def _last(self) -> int:
        return self._run.world_size - 1

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        """One micro-batch, forward and backward: the sum of its chunks' mean losses on the last stage, else 0. Gradients are those of the mean."""
        xs, ys = x.chunk(ARGS.chunks), y.chunk(ARGS.chunks)
        ahead = min(self._last - self._rank, ARGS.chunks)
        losses = torch.zeros((), device=self._device)
        open_: list[tuple[Tensor, Tensor]] = []
        forwards = backwards = 0
        incoming = self._exchange(activation=self._rank > 0)[0]
        while backwards < ARGS.chunks:
            sent_down: Tensor | None = None
            if forwards < ARGS.chunks:
                given = xs[forwards] if self._rank == 0 else _leaf(incoming)
                out = self._part(given)
                if self._rank == self._last:
                    out = nn.functional.mse_loss(out, ys[forwards]) / ARGS.chunks
                    losses += out.detach()
                else:
                    sent_down = out.detach()
                open_.append((given, out))
                forwards += 1
            goes_back = forwards > ahead or forwards == ARGS.chunks
            more = forwards < ARGS.chunks and self._rank > 0
            if not goes_back:
                incoming = self._exchange(down=sent_down, activation=more)[0]
                continue
            gradient = self._exchange(down=sent_down, gradient=self._rank < self._last)[1]
            given, out = open_.pop(0)
            out.backward(gradient)
            backwards += 1
            up = given.grad if self._rank > 0 else None
            incoming = self._exchange(up=up, activation=more)[0]
        return losses

    def _exchange(
        self, *, down: Tensor | None = None, up: Tensor | None = None, activation: bool = False, gradient: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send an activation ``down`` and a gradient ``up``, and receive what comes from there: all at once."""
        operations, got = [], [self._room() if wanted else None for wanted in (activation, gradient)]
        for tensor, call, peer in (
            (up, dist.isend, self._rank - 1),
            (got[0], dist.irecv, self._rank - 1),
            (down, dist.isend, self._rank + 1),
            (got[1], dist.irecv, self._rank + 1),
        ):
            if tensor is not None:
                operations.append(dist.P2POp(call, tensor.contiguous(), peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return got[0], got[1]

    def _room(self) -> Tensor:
        return torch.empty(ARGS.rows, ARGS.width, device=self._device)


def _leaf(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "all but the first stage receive"
    return tensor.requires_grad_()


@rackrun.elastic(
    global_batch_size=ARGS.chunks * ARGS.rows,
    micro_batch_size=ARGS.chunks * ARGS.rows,
    seed=3,
    snapshot_every=1,
    mesh={"pp": -1},
)
def main(run: rackrun.Run) -> None:
    record, strikes = Record(ARGS.record), Strikes(ARGS.strikes, ARGS.flags)
    part = nn.Sequential(nn.Linear(ARGS.width, ARGS.width), nn.GELU(), nn.Linear(ARGS.width, ARGS.width)).to(run.device)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    run.track(model=part, optimizer=optimizer)
    data = run.loader(Points())
    stage = Stage(part, run)

    @run.step
    def train_step(step: rackrun.Step) -> tuple[Tensor, list[int]]:
        at, ids = int(step), []
        record.write("begin", rank=run.rank, step=at, attempt=step.attempt)
        strikes.at("begin", run.rank, at, record)
        loss = torch.zeros((), device=run.device)
        for x, y, index in data:
            loss = stage.run(x, y)
            ids += numbers(index)
        weight = step.weight  # a stage in the middle has no loss that could be weighted
        for parameter in part.parameters():
            assert parameter.grad is not None
            parameter.grad *= weight
        strikes.at("backward", run.rank, at, record)
        optimizer.step()
        strikes.at("update", run.rank, at, record)
        optimizer.zero_grad()
        return loss, ids if run.rank == 0 else []

    for step in run.steps(ARGS.steps):
        loss, ids = train_step(step)
        record.write("done", rank=run.rank, step=int(step), loss=float(loss).hex(), ids=ids)
        strikes.wait_for_spares()
    state = [optimizer.state[one][key] for one in part.parameters() for key in ("exp_avg", "exp_avg_sq")]
    record.write("end", rank=run.rank, weights=digest_of(part.parameters()), moments=digest_of(state))


if __name__ == "__main__":
    show_stacks_in_time()
    with doubled():
        main()
