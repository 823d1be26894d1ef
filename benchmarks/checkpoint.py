"""What a checkpoint costs in bytes per second, as ratios to what this machine does at best, and beside torch's and
safetensors'.

    python benchmarks/checkpoint.py            a state of 1 GB (6 GB of memory, 3 GB of disk)
    python benchmarks/checkpoint.py --quick    256 MB

One process, one rank, one thread unless it says otherwise; fp32 tensors of 4 MiB, a small one beside each. In every
round each case runs once, in an order that changes; a ratio is taken within a round, and the median of all rounds is
reported. CPU time of the process is measured too, because somebody else may be using the machine. Writes to disk end
with an fsync, for all; reads come from the page cache.

**Sealing** copies the state into an arena and takes the CRC32C of each chunk; **memcpy** copies as many bytes in one
block. **Stall**: for how long a training loop that takes a snapshot in every step does not compute, before its step
and at the fence after it. **Restore** verifies an arena's image, all of it, and then copies it into tensors, with two
threads, so its ratio is of wall times; a **plain read** only copies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from jobs import machine, save

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.image.reshard import fill, plan_reshard
from rackrun.checkpoint.image.safetensors_image import plan_image, read_tensors, write_head, write_image, write_tensors
from rackrun.checkpoint.image.tensor_entries import entries_of
from rackrun.checkpoint.redundancy.erasure_code import Row, mix_into, xor_into
from rackrun.checkpoint.redundancy.stripe_set import Part, StripeSet

PLAIN = b"plain state"
SIDE = 1024
"""Of a large tensor; a small one has as many elements."""
WANTED = {"sealing": 0.45, "xor": 0.8, "restore": 0.8}
STALL_MS_MAX = 10.0

Timed = Callable[[], None]
Case = Callable[[Timed, Timed], None]
"""Prepares, calls the first, works, calls the second, cleans up."""


class Bench:
    def __init__(self, megabytes: int, folder: Path) -> None:
        count = megabytes * 2**20 // (4 * SIDE * (SIDE + 1))
        self.state = {f"layers.{i}.weight": torch.randn(SIDE, SIDE) for i in range(count)}
        self.state |= {f"layers.{i}.bias": torch.randn(SIDE) for i in range(count)}
        self.tensors = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.layout = plan_image(entries_of(self.state), len(PLAIN))
        self.bytes = self.layout.total_bytes
        self.flat = np.ones(self.bytes, dtype=np.uint8)
        self.folder = folder
        self.fd = os.memfd_create("rackrun-benchmark", os.MFD_CLOEXEC)
        self.arena = Arena.create(self.fd, job="bench", rank=0, fencing_token=1, slots=2, payload_bytes=self.bytes)
        self.number = 0
        self._seal_one()
        self.stripe_set = StripeSet((0, 1, 2, 3))
        self.shards = [np.full(self.bytes // 8, 17 * rank + 1, dtype=np.uint8) for rank in range(4)]
        self.parity = np.zeros(self.stripe_set.widest(self.bytes // 8), dtype=np.uint8)

    def stripe(self, owner: int, keeper: int) -> np.ndarray[Any, Any]:
        start, stop = self.stripe_set.stripe(owner, Part(keeper), self.bytes // 8)
        return self.shards[owner][start:stop]

    def _seal_one(self) -> None:
        self.number += 1
        with self.arena.begin(self.number, 0) as writer:
            write_image(self.layout, self.state, PLAIN, writer.payload)
            writer.seal(self.bytes, self.layout.layout_hash)
        self.arena.commit(self.number)

    # -- memory
    def memcpy(self, start: Timed, stop: Timed) -> None:
        with self.arena.begin(self.number + 1, 0) as writer:
            target = np.frombuffer(writer.payload, dtype=np.uint8)[: self.bytes]
            start()
            np.copyto(target, self.flat)
            stop()

    def copying(self, start: Timed, stop: Timed) -> None:
        """The tensors, without a checksum: what is left of memcpy's rate when the bytes come from many places."""
        with self.arena.begin(self.number + 1, 0) as writer:
            start()
            write_image(self.layout, self.state, PLAIN, writer.payload)
            stop()

    def sealing(self, start: Timed, stop: Timed) -> None:
        with self.arena.begin(self.number + 1, 0) as writer:
            start()
            write_head(self.layout, PLAIN, writer.payload)
            write_tensors(self.layout, self.state, writer.payload, writer.filled)
            writer.seal(self.bytes, self.layout.layout_hash)
            stop()
        self.arena.release(self.number + 1)

    def sealing_in_two_passes(self, start: Timed, stop: Timed) -> None:
        with self.arena.begin(self.number + 1, 0) as writer:
            start()
            write_image(self.layout, self.state, PLAIN, writer.payload)
            writer.seal(self.bytes, self.layout.layout_hash)
            stop()
        self.arena.release(self.number + 1)

    def plain_read(self, start: Timed, stop: Timed) -> None:
        """Into the same tensors, and nothing is verified."""
        start()
        source = np.frombuffer(self.arena.reader(self.number).payload, dtype=np.uint8)
        for name, tensor in self.tensors.items():
            begin, end = self.layout.extents[name]
            np.copyto(tensor.numpy().reshape(-1).view(np.uint8), source[begin:end])
        stop()

    def restore(self, start: Timed, stop: Timed) -> None:
        """As `rackrun.worker.snapshots.shard_snapshots` does it: all is verified before a tensor is touched."""
        self._restore(start, stop, threads=2)

    def restore_with_one_thread(self, start: Timed, stop: Timed) -> None:
        self._restore(start, stop, threads=1)

    def _restore(self, start: Timed, stop: Timed, threads: int) -> None:
        start()
        reader = self.arena.reader(self.number)
        reader.verify(threads)
        read_tensors(self.layout, self.tensors, reader.payload, threads)
        stop()

    def numpy_xor(self, start: Timed, stop: Timed) -> None:
        shards = [shard[: len(shard) // 8 * 8].view(np.uint64) for shard in self.shards[:2]]
        start()
        for _ in range(3):
            np.bitwise_xor(shards[0], shards[1], out=shards[0])
        stop()

    def xor(self, start: Timed, stop: Timed) -> None:
        """All four members' rows: each byte of each shard is mixed into one of them."""
        start()
        for owner, keeper in permutations(range(4), 2):
            stripe = self.stripe(owner, keeper)
            xor_into(self.parity[: len(stripe)], stripe)
        stop()

    def reed_solomon(self, start: Timed, stop: Timed) -> None:
        """The same, each stripe multiplied on the way: what a second parity costs. Needs rackrun[rs]."""
        start()
        for owner, keeper in permutations(range(4), 2):
            stripe = self.stripe(owner, keeper)
            for at in range(0, len(stripe), 2**20):
                block = stripe[at : at + 2**20]
                mix_into(self.parity[at : at + len(block)], block, 7 + owner)
        stop()

    def xor_digested(self, start: Timed, stop: Timed) -> None:
        """The same as an agent does it: each stripe is checked on the way in."""
        crcs = {pair: crc(self.stripe(*pair)) for pair in permutations(range(4), 2)}
        start()
        for keeper in range(4):
            row = Row(1, self.stripe_set, Part(keeper), lambda _: self.parity)
            for owner in (owner for owner in range(4) if owner != keeper):
                incoming = row.begin(owner, self.bytes // 8)
                incoming.add(self.stripe(owner, keeper))
                incoming.end(crcs[owner, keeper])
            row.header()
        stop()

    # -- disk
    @contextlib.contextmanager
    def room(self) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield place
        finally:
            shutil.rmtree(place)

    def durable_write(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            reader = self.arena.reader(self.number)
            start()
            self._durable(place, reader)
            stop()

    def durable_read(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            self._durable(place, self.arena.reader(self.number))
            start()
            with DurableStore(place, "bench").open(1) as reader:
                fill(plan_reshard([self.layout], self.layout.entries), self.tensors, reader.read)
            stop()

    def _durable(self, place: Path, reader: Any) -> None:
        writer = DurableStore(place, "bench").writer(1, 1, 1, 1)
        assert writer.write_shard(0, reader, self.layout.layout_hash, reader.crcs)
        assert writer.finish(), writer.failure

    def torch_save(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            start()
            torch.save(self.state, place / "state.pt")
            synced(place / "state.pt")
            stop()

    def torch_load(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            torch.save(self.state, place / "state.pt")
            start()
            for name, tensor in torch.load(place / "state.pt", weights_only=True).items():
                self.tensors[name].copy_(tensor)
            stop()

    def safetensors_save(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            start()
            safetensors.torch.save_file(self.state, place / "state.safetensors")
            synced(place / "state.safetensors")
            stop()

    def safetensors_load(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            safetensors.torch.save_file(self.state, place / "state.safetensors")
            start()
            for name, tensor in safetensors.torch.load_file(place / "state.safetensors").items():
                self.tensors[name].copy_(tensor)
            stop()

    def dcp_save(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            start()
            dcp.save(dict(self.state), storage_writer=dcp.FileSystemWriter(place / "run"))
            stop()

    def dcp_load(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            dcp.save(dict(self.state), storage_writer=dcp.FileSystemWriter(place / "run"))
            start()
            dcp.load(dict(self.tensors), storage_reader=dcp.FileSystemReader(place / "run"))
            stop()

    def dcp_async_until_it_returns(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            start()
            done: Any = dcp.async_save(dict(self.state), storage_writer=dcp.FileSystemWriter(place / "run"))
            stop()
            done.result()

    def our_dcp_save(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            start()
            dcp.save(dict(self.state), storage_writer=RackrunStorageWriter(place / "run"))
            stop()

    def our_dcp_load(self, start: Timed, stop: Timed) -> None:
        with self.room() as place:
            dcp.save(dict(self.state), storage_writer=RackrunStorageWriter(place / "run"))
            start()
            dcp.load(dict(self.tensors), storage_reader=RackrunStorageReader(place / "run"))
            stop()

    # -- a training loop
    def stall(self, step_s: float, steps: int) -> list[dict[str, float]]:
        """A snapshot in every step: what the loop waits for, in milliseconds. A step is ``step_s`` of products of
        matrices."""
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            writer = self.arena.begin(self.number + 1, 0)
            write_head(self.layout, PLAIN, writer.payload)
            copy = threading.Thread(target=self._copy, args=[writer])
            copy.start()
            stalled = time.perf_counter()
            while time.perf_counter() - stalled < step_s:
                torch.mm(a, b)
            fence = time.perf_counter()
            copy.join()
            ended = time.perf_counter()
            self.arena.release(self.number + 1)
            found.append({"stall_ms": (stalled - began) * 1e3, "fence_ms": (ended - fence) * 1e3})
        return found

    def _copy(self, writer: Any) -> None:
        write_tensors(self.layout, self.state, writer.payload, writer.filled)
        writer.seal(self.bytes, self.layout.layout_hash)

    def close(self) -> None:
        self.arena.close()
        os.close(self.fd)


MEMORY = (
    *("memcpy", "copying", "sealing", "sealing_in_two_passes"),
    *("plain_read", "restore", "restore_with_one_thread", "numpy_xor", "xor", "xor_digested"),
    *(["reed_solomon"] if importlib.util.find_spec("pyeclib") else []),
)
DISK = (
    *("durable_write", "our_dcp_save", "dcp_save", "dcp_async_until_it_returns", "torch_save", "safetensors_save"),
    *("durable_read", "our_dcp_load", "dcp_load", "torch_load", "safetensors_load"),
)
BASE = {
    **dict.fromkeys(("copying", "sealing", "sealing_in_two_passes"), "memcpy"),
    **dict.fromkeys(("restore", "restore_with_one_thread"), "plain_read"),
    **dict.fromkeys(("xor", "xor_digested", "reed_solomon"), "numpy_xor"),
}
TWO_THREADS = {"restore"}


def synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def measured(case: Case) -> tuple[float, float]:
    """Seconds by the clock, and of this process's work."""
    at: list[tuple[float, float]] = []

    def mark() -> None:
        at.append((time.perf_counter(), time.process_time()))

    case(mark, mark)
    return at[1][0] - at[0][0], at[1][1] - at[0][1]


def median_ratio(rates: dict[str, list[float]], name: str) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(rates[name], rates[BASE[name]], strict=True))


def summary(result: dict[str, Any]) -> str:
    lines = ["| in memory | GB/s | GB/s of CPU time | ratio | of CPU time | wanted |", "|---|---|---|---|---|---|"]
    wall, cpu = result["gb_per_s"], result["gb_per_cpu_s"]
    for name in MEMORY:
        ratios = ["", ""]
        if name in BASE:
            ratios = [f"{median_ratio(wall, name):.2f} of {BASE[name]}", f"{median_ratio(cpu, name):.2f}"]
        rates = [f"{statistics.median(of[name]):.1f}" for of in (wall, cpu)]
        lines.append(f"| {' | '.join([name, *rates, *ratios, str(WANTED.get(name, ''))])} |".replace("_", " "))
    stall, fence = (statistics.median(step[key] for step in result["stall"]) for key in ("stall_ms", "fence_ms"))
    lines.append("")
    lines.append(f"A snapshot in every step of {result['step_s'] * 1e3:.0f} ms: the loop stalls for {stall:.1f} ms ")
    lines[-1] += f"({STALL_MS_MAX:.0f} wanted), and for {fence:.1f} ms at the fence."
    lines += ["", "| on disk, with fsync | GB/s | spread | GB/s of CPU time |", "|---|---|---|---|"]
    for name in DISK:
        found = wall[name]
        spread = f"{min(found):.2f}–{max(found):.2f}"
        middle, of_cpu = (f"{statistics.median(of[name]):.2f}" for of in (wall, cpu))
        lines.append(f"| {name.replace('_', ' ')} | {middle} | {spread} | {of_cpu} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 MB")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is measured; a temporary one")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    megabytes, rounds, disk_rounds = (256, 11, 3) if args.quick else (1024, 11, 7)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
    result: dict[str, Any] = {"machine": machine(), "quick": args.quick, "seed": args.seed, "megabytes": megabytes}
    if result["machine"]["load_at_start"] > 0.5:
        print(f"warning: this machine is busy (load {result['machine']['load_at_start']})", file=sys.stderr)

    rng = random.Random(args.seed)
    wall: dict[str, list[float]] = {name: [] for name in (*MEMORY, *DISK)}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    with tempfile.TemporaryDirectory(prefix="rackrun-bench-", dir=args.folder) as folder:
        bench = Bench(megabytes, Path(folder))
        moved = dict.fromkeys(wall, bench.bytes) | {"numpy_xor": 3 * (bench.bytes // 8)}
        moved |= dict.fromkeys(("xor", "xor_digested", "reed_solomon"), 4 * (bench.bytes // 8))
        for number in range(-1, rounds):
            for name in rng.sample(MEMORY, len(MEMORY)):
                taken = measured(getattr(bench, name))
                if number >= 0:  # the first round warms up
                    wall[name].append(moved[name] / 1e9 / taken[0])
                    cpu[name].append(moved[name] / 1e9 / taken[1])
        result["step_s"] = round(2.5 * bench.bytes / 1e9 / statistics.median(wall["sealing"]), 2)
        result["stall"] = bench.stall(result["step_s"], rounds)
        for number in range(disk_rounds):
            for name in rng.sample(DISK, len(DISK)):
                taken = measured(getattr(bench, name))
                wall[name].append(moved[name] / 1e9 / taken[0])
                cpu[name].append(moved[name] / 1e9 / taken[1])
            print(f"disk round {number + 1}/{disk_rounds}", file=sys.stderr)
        bench.close()

    result |= {"gb_per_s": wall, "gb_per_cpu_s": cpu}
    result["ratios"] = {
        name: median_ratio(wall if name in TWO_THREADS else cpu, name) for name in BASE if name in MEMORY
    }
    result["missed"] = [name for name, least in WANTED.items() if result["ratios"][name] < least]
    if statistics.median(step["stall_ms"] for step in result["stall"]) > STALL_MS_MAX:
        result["missed"].append("stall")
    result["table"] = summary(result)
    path = save("checkpoint-quick" if args.quick else "checkpoint", result)
    print(f"{result['table']}\n\nmissed: {', '.join(result['missed']) or 'nothing'}\n{result['machine']}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
