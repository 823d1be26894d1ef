"""A small training in which one rank hangs once, in one way, in one place; or has phases of any length.

hanging.py FOLDER PLACE KIND: PLACE is ``setup``, ``first``, ``step``, ``phase``, ``between``, ``reentry``, ``after`` or ``none``. Before it hangs the rank writes when, and
its process, to ``FOLDER/hung``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import rackrun

FOLDER, PLACE, KIND = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
STEPS, HANGS_AT, EVERY = 60, 40, 4
STEP_S, PHASE_S = 0.05, 0.8


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def sleep() -> None:
    time.sleep(3600)


def sleep_with_the_lock() -> None:
    ctypes.PyDLL(None).sleep(3600)


def loop() -> None:
    while True:
        pass


def loop_that_computes() -> None:
    rows = torch.randn(64, 64)
    while True:
        torch.mm(rows, rows)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    held = threading.Lock()

    def never_releases() -> None:
        with held:
            threading.Event().wait()

    threading.Thread(target=never_releases, daemon=True).start()
    while not held.locked():
        time.sleep(0.001)
    with held:
        pass


def system_call() -> None:
    os.read(os.pipe()[0], 1)


KINDS: dict[str, Callable[[], None]] = {
    "sleep": sleep,
    "sleep with the lock": sleep_with_the_lock,
    "loop": loop,
    "loop that computes": loop_that_computes,
    "stop": stop,
    "deadlock": deadlock,
    "system call": system_call,
}


def once(name: str) -> bool:
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hang_if(place: str, rank: int) -> None:
    if place == PLACE and rank == 1 and once("hangs"):
        (FOLDER / "hung.new").write_text(json.dumps({"t": time.monotonic(), "pid": os.getpid()}))
        (FOLDER / "hung.new").rename(FOLDER / "hung")
        KINDS[KIND]()


@rackrun.elastic(global_batch_size=24, micro_batch_size=2, reduction="exact")
def main(run: rackrun.Run) -> None:
    if PLACE == "setup":
        hang_if("setup", run.rank)
    if (FOLDER / "lost").exists():
        hang_if("reentry", run.rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    wrapped: nn.Module = model
    if PLACE == "reentry":
        fully_shard(model)
    else:
        wrapped = DDP(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    run.track(model=wrapped, optimizer=optimizer)
    data = run.loader(Points())
    now = -1

    @run.step
    def train(step: rackrun.Step) -> None:
        for batch in data:
            step.backward((wrapped(batch) - batch).square().mean())
        time.sleep(STEP_S)
        if int(step) == HANGS_AT:
            hang_if("step", run.rank)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        time.sleep(PHASE_S)
        if now >= HANGS_AT:
            hang_if("phase", run.rank)

    run.every(EVERY, evaluate)
    for step in run.steps(STEPS):
        now = int(step)
        train(step)
        if now == 0:
            hang_if("first", run.rank)
        if now == HANGS_AT:
            hang_if("between", run.rank)
        if PLACE == "reentry" and now == 12 and run.rank == 3 and once("lost"):
            os.kill(os.getpid(), signal.SIGKILL)


main()
if PLACE == "after" and os.environ.get("RANK") == "1":
    hang_if("after", 1)
