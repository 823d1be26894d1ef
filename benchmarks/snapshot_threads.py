"""What the background threads of a snapshot take of the interpreter's lock, and what the training thread waits for it.

    python benchmarks/snapshot_threads.py                      this tree (about 2 minutes)
    python benchmarks/snapshot_threads.py --against /tmp/old   and an older tree of this repository, in turn

One process, on one thread, calls small torch operations as fast as it can, as a script does that launches kernels. Each gives the
interpreter's lock up and takes it again. In every second turn a snapshot is taken first, as a rank with a GPU does after each step. Streams
and events are played: copies take the time that a bus of 50 GB/s needs, and digests that of a core that does 10 GB/s, asleep. So neither a GPU
nor the cores of its host are needed, and what the training thread waits for is the lock.

**Takings** counts how often the threads of a snapshot take the lock: a small library that gcc builds stands before Python's
``PyEval_RestoreThread``, through which every C function goes that has given the lock up. It needs a Python with a shared libpython (``ldd``
shows one). *cpu* is the processor time of those threads, nearly all of which they hold or take the lock. Both hold on a busy host; what follows
needs an idle one. **Slowdown** is the time of the same operations, which last about as long as a step's launches, with a snapshot over that without: the median of the turns.
*take* is how long the training thread is in ``Snapshots.take``. Both depend on how fast a thread of this host wakes up.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jobs import machine, save
from torch import nn

HERE = Path(__file__).resolve().parents[1]
BUS = 50e9
CORE = 10e9
"""Bytes a second: what copies, and what a thread digests."""
OPERATIONS = 4_000
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
static __thread int trains;
static long takings[2];
static void (*restore)(void *);
void PyEval_RestoreThread(void *state) {
    if (!restore) restore = dlsym(RTLD_NEXT, "PyEval_RestoreThread");
    restore(state);
    __atomic_add_fetch(&takings[trains], 1, __ATOMIC_RELAXED);
}
void this_thread_trains(void) { trains = 1; }
long takings_of_others(void) { return takings[0]; }
"""


# -- the script that is measured
class Played:
    """A stream, or an event in it: of copies that take the time of the bus."""

    _device_is_free_at = 0.0

    def __init__(self, *_: object, **__: object) -> None:
        self._at = 0.0

    @classmethod
    def copy(cls, targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        assert non_blocking
        free_at = max(time.perf_counter(), cls._device_is_free_at)
        cls._device_is_free_at = free_at + sum(one.nbytes for one in sources) / BUS
        torch._foreach_add_(targets[:0] or [torch.zeros(1)], 0)  # a call that gives the lock up once

    def wait_event(self, _: object) -> None: ...

    def record(self) -> None:
        self._at = Played._device_is_free_at

    def synchronize(self) -> None:
        time.sleep(max(self._at - time.perf_counter(), 0.0))

    def elapsed_time(self, _: object) -> float:
        return 0.0


def worker(mib: int, layers: int, threads: int) -> None:
    from rackrun.checkpoint.base import digest

    torch.set_num_threads(1)
    counter = ctypes.PyDLL(os.environ["LD_PRELOAD"])
    counter.this_thread_trains()
    cuda: Any = torch.cuda
    played_torch: Any = torch
    cuda.Stream = cuda.Event = Played
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.set_device = lambda _: None
    played_torch._foreach_copy_ = Played.copy
    digest.crc = _crc
    snapshots = _snapshots(mib, layers, threads)
    for step in range(2):  # the memory of both
        snapshots.take(step)
        snapshots.settle()
    value = torch.zeros(16)
    for line in sys.stdin:
        for _ in range(OPERATIONS // 4):  # it has slept
            value.add_(1.0)
        before, cpu = counter.takings_of_others(), time.process_time() - time.thread_time()
        at = time.perf_counter()
        snapshot = line.startswith("snapshot")
        if snapshot:
            step += 1
            snapshots.take(step)
        taken = time.perf_counter() - at
        for _ in range(OPERATIONS):
            value.add_(1.0)
        seconds = time.perf_counter() - at - taken
        snapshots.settle()
        takings = counter.takings_of_others() - before
        beside = time.process_time() - time.thread_time() - cpu
        print(json.dumps({"seconds": seconds, "take_s": taken, "takings": takings, "cpu_s": beside}), flush=True)
    assert not [one for one in threading.enumerate() if one.name.startswith("rackrun-snapshot-")]
    os._exit(0)


def _crc(data: Any, value: int = 0) -> int:
    time.sleep(len(data) / CORE)
    return value


def _snapshots(mib: int, layers: int, threads: int) -> Any:
    """Snapshots of Linear layers and their AdamW, ``mib`` MiB in all."""
    from rackrun.checkpoint.host_memory.background_pinning import Pinning
    from rackrun.worker.snapshots import shard_snapshots
    from rackrun.worker.state.tracked_state import TrackedState

    played: Any = Pinning
    played.pin = played.unpin = lambda *_: None
    played.cuts = lambda *_: []
    shard_snapshots._digesting_threads = lambda: threads
    width = int((mib * 2**20 / 12 / layers) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = TrackedState()
    state.track("model", model)
    state.track("optimizer", optimizer)
    world = {"rank": 0, "layout": 0, "generation": 1, "replica_class": "", "has_mirrors": False}
    runtime: Any = SimpleNamespace(
        world=SimpleNamespace(**world, unless_broken=lambda act: act() or True),
        boot=SimpleNamespace(snapshot_fds=[os.memfd_create("benchmark") for _ in range(2)]),
        page=SimpleNamespace(mirrored=-1, seal_snapshot=lambda *_: None, progress=lambda: None),
        device=torch.device("cuda", 0),
    )
    return shard_snapshots.Snapshots(runtime, state, every=1)


# -- who measures it
class Script:
    def __init__(self, tree: Path, counter: Path, sizes: list[str]) -> None:
        env = {**os.environ, "PYTHONPATH": str(tree), "LD_PRELOAD": str(counter), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", *sizes]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self, what: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a script has ended")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measured(trees: dict[str, Path], counter: Path, sizes: list[str], rounds: int) -> dict[str, Any]:
    scripts = {name: Script(tree, counter, sizes) for name, tree in trees.items()}
    turns: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in trees}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(sorted(scripts), len(scripts)):
            without, with_ = (scripts[name].turn(what) for what in ("nothing", "snapshot"))
            if number:  # the first warms up
                turns[name].append((without, with_))
    for script in scripts.values():
        script.close()
    return {
        name: {
            "takings": statistics.median(with_["takings"] for _, with_ in of),
            "cpu_ms": round(1e3 * statistics.median(with_["cpu_s"] for _, with_ in of), 2),
            "take_ms": round(1e3 * statistics.median(with_["take_s"] for _, with_ in of), 2),
            "slowdown": round(statistics.median(with_["seconds"] / without["seconds"] for without, with_ in of), 3),
        }
        for name, of in turns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="an older tree of this repository")
    parser.add_argument(
        "--mib", type=int, default=1024, help="the state of a rank; two snapshots of it are kept as well"
    )
    parser.add_argument("--layers", type=int, default=26, help="each has 8 tensors")
    parser.add_argument("--threads", type=int, default=8, help="the most that digest")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.mib, args.layers, args.threads)
        return
    trees = {"this": HERE, **({"older": args.against.resolve()} if args.against else {})}
    sizes = ["--mib", str(args.mib), "--layers", str(args.layers), "--threads", str(args.threads)]
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "counter.so"
        build = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(counter), "-ldl", "-lpthread"]
        subprocess.run(build, input=COUNTER, text=True, check=True)
        found = measured(trees, counter, sizes, args.rounds)
    if not found["this"]["takings"]:
        raise SystemExit("nothing was counted: this Python has no shared libpython")
    result = {"machine": machine(), "mib": args.mib, "tensors": 8 * args.layers, "threads": args.threads, **found}
    path = save("snapshot_threads", result)
    print(json.dumps(found, indent=1))
    if args.against:
        for what in ("takings", "cpu_ms", "take_ms"):
            print(f"{what}: this over older {found['this'][what] / found['older'][what]:.3f}")
    print(path)


if __name__ == "__main__":
    main()
