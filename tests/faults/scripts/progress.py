"""A small training in which something takes long, or is lost, after a given step: progress.py FOLDER WHAT, where ``FOLDER`` is shared by all ranks.

Each process writes ``FOLDER/pid-RANK`` before its first step. ``WHAT``:
``busy``: rank 1 works between two steps for ``SECONDS``, as long as rank 0 is killed and replaced; ``hangs``: it sleeps there, once;
``save``: rank 0 works in its first phase, for many times as long as a step; ``evaluate``: all sleep in a phase;
``after``: rank 1 is killed, ``stopped``: it is stopped, when ``main`` has returned on it and not on rank 0;
``hangs first``, ``hangs in setup``, ``hangs after the loop``, ``hangs at exit``: rank 1 sleeps for ever, once, where it has no history: after the first
step, before ``run.steps()``, before ``main`` returns, after it has; ``spins ...``: it goes round in an empty loop there;
``most hang``: ranks 1 and 2 of three sleep for ever in one step, once each;
``polls``: rank 0 looks once a second, in its first phase, whether ``SECONDS`` are over, and all others wait for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 4.0
STEPS, AT = 24, 14


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def once(name: str) -> bool:
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def work(until: Callable[[], bool]) -> None:
    while not until():
        torch.randn(64, 64).matmul(torch.randn(64, 64))


def seconds_of_work() -> Callable[[], bool]:
    began = time.thread_time()
    return lambda: time.thread_time() - began > SECONDS


def kill(rank: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(int((FOLDER / f"pid-{rank}").read_text()), how)


def hang_if(place: str, rank: int) -> None:
    how, _, where = WHAT.partition(" ")
    if where == place and rank == 1 and once("hung"):
        while how == "spins":
            pass
        time.sleep(3600)


def tell(line: str) -> None:
    with (FOLDER / "told").open("a") as file:
        file.write(f"{line}\n")


@rackrun.elastic(global_batch_size=12, micro_batch_size=2)
def main(run: rackrun.Run) -> None:
    hang_if("in setup", run.rank)
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Points())

    @run.step
    def train(step: rackrun.Step) -> None:
        if WHAT == "most hang" and int(step) == AT and run.rank > 0 and once(f"hung {run.rank}"):
            time.sleep(3600)
        for batch in data:
            step.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def phase() -> None:
        tell(f"{WHAT} on {run.rank}")
        if WHAT == "evaluate" or (WHAT == "save" and run.rank == 0):
            work(seconds_of_work()) if WHAT == "save" else time.sleep(SECONDS)
        if WHAT == "polls" and run.rank == 0 and once("polled"):
            for _ in range(int(SECONDS)):
                time.sleep(1.0)

    if WHAT in ("save", "evaluate", "polls"):
        run.every(12, phase)
    for step in run.steps(STEPS):
        if int(step) == 0:
            (FOLDER / f"pid-{run.rank}").write_text(str(os.getpid()))
        train(step)
        if int(step) == 0:
            hang_if("first", run.rank)
        if int(step) == AT and run.rank == 1 and WHAT in ("busy", "hangs") and once("long"):
            kill(0)
            if WHAT == "busy":
                work(seconds_of_work())
            else:
                time.sleep(3600)
    hang_if("after the loop", run.rank)
    if WHAT in ("after", "stopped") and run.rank == 0:
        while not (FOLDER / "returns").exists():
            time.sleep(0.01)
        time.sleep(SECONDS)
        if once("gone"):
            kill(1, signal.SIGKILL if WHAT == "after" else signal.SIGSTOP)
            time.sleep(SECONDS)
    elif run.rank == 1:
        (FOLDER / "returns").touch()


main()
hang_if("at exit", int(os.environ["RANK"]))
