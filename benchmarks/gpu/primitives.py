"""B: memory, copies, kernels and digests on one GPU. Rates are medians; a dry run goes the same way with little memory and judges no rate."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.registry import Context, Found, Skip, check, failed

__all__: list[str] = []

_RATE = "a rate of the GPU's memory or bus"
GIB, MIB = 2**30, 2**20
_CALLS = 8
"""Of a kernel of half a millisecond, so that the wait for the device does not count."""


def _seconds(context: Context, work: Callable[[], Any], rounds: int = 5, calls: int = 1) -> float:
    """Of one call, where ``calls`` are made from an idle device to an idle device: median, after a first round that is not counted."""
    times = []
    for _ in range(rounds + 1):
        _idle(context)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        _idle(context)
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times[1:])


def _idle(context: Context) -> None:
    if not context.dry:
        import torch

        torch.cuda.synchronize()


def _keep(context: Context, name: str, value: float) -> None:
    (context.shared / name).write_text(repr(value))


def _kept(context: Context, name: str) -> float | None:
    path = context.shared / name
    return float(path.read_text()) if path.exists() else None


@check(
    "B1", "copy on the device", expected=">= 4.0 TB/s read and written (H200)", limit_s=40, must=False, not_dry=_RATE
)
def copy_on_device(context: Context) -> Found:
    import torch

    size = 8 * GIB
    source = torch.empty(size, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    rate = 2 * size / _seconds(context, lambda: target.copy_(source)) / 1e12
    _keep(context, "B1", rate)
    h200 = "H200" in torch.cuda.get_device_name(0)
    return Found(rate, "TB/s", ok=rate >= (4.0 if h200 else 2.4))


@check(
    "B2",
    "host to device and back, pinned, and both at once",
    expected=">= 50 GB/s each",
    limit_s=40,
    must=False,
    not_dry=_RATE,
)
def bus(context: Context) -> Found:
    import torch

    size = 2 * GIB
    host, back = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    device, other = (torch.empty(size, dtype=torch.uint8, device=context.device) for _ in range(2))
    down = size / _seconds(context, lambda: device.copy_(host, non_blocking=True)) / 1e9
    up = size / _seconds(context, lambda: back.copy_(other, non_blocking=True)) / 1e9
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(one):
            device.copy_(host, non_blocking=True)
        with torch.cuda.stream(two):
            back.copy_(other, non_blocking=True)

    together = size / _seconds(context, both) / 1e9
    _keep(context, "B2", up)
    context.note(f"to the device {down:.1f}, back {up:.1f}, both at once {together:.1f} GB/s each")
    return Found(min(down, up), "GB/s", ok=min(down, up) >= 50)


@check(
    "B3",
    "registration of an arena: whole, in pieces, with huge pages",
    expected=">= 2 GB/s, want >= 8",
    limit_s=60,
    must=False,
    not_dry=_RATE,
)
def registration(context: Context) -> Found:
    from rackrun.checkpoint.host_memory.host_registration import register_memory, unregister_memory

    best = 0.0
    for name, piece, huge in (("whole", 4 * GIB, False), ("pieces of 1 GiB", GIB, False), ("huge pages", GIB, True)):
        arena = _Arena(4 * GIB, huge=huge)
        try:
            arena.touch()
            began = time.perf_counter()
            starts = range(0, arena.size, piece)
            done = all(register_memory(arena.address + start, piece) for start in starts)
            took_s = time.perf_counter() - began
            began = time.perf_counter()
            for start in starts:
                unregister_memory(arena.address + start)
            undone_s = time.perf_counter() - began
        finally:
            arena.close()
        rate = arena.size / took_s / 1e9 if done else 0.0
        best = max(best, rate)
        context.note(
            f"{name}: {rate:.1f} GB/s" + (f", and back {arena.size / undone_s / 1e9:.1f}" if done else ": refused")
        )
    return Found(best, "GB/s", ok=best >= 2)


class _Arena:
    """Shared memory without a name, as snapshots lie in."""

    def __init__(self, size: int, *, huge: bool = False) -> None:
        self.size = size
        self.fd = os.memfd_create("rackrun-kit")
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._held = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._held)

    def touch(self) -> None:
        ctypes.memset(self.address, 1, self.size)

    def close(self) -> None:
        del self._held
        self.memory.close()
        os.close(self.fd)


class _Runtime:
    """CUDA's runtime as far as registration asks it, for a dry run: it refuses, and remembers that."""

    def __init__(self) -> None:
        self.last_error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802, ARG002
        self.last_error = 712
        return 712

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802, ARG002
        self.last_error = 713
        return 713

    def cudaGetLastError(self) -> int:  # noqa: N802
        taken, self.last_error = self.last_error, 0
        return taken


@check("B4", "a registration that fails, and the next kernel", expected="no error is left", limit_s=40)
def failed_registration(context: Context) -> Found:
    import torch

    from benchmarks.gpu import seams
    from rackrun.checkpoint.host_memory import host_registration as product

    if context.dry:
        runtime = _Runtime()
        seams.play_runtime(runtime)
        if product.register_memory(4096, 4096, runtime) or product.unregister_memory(4096, runtime):
            return failed("a refusal is taken for a success")
        return Found("clean") if runtime.last_error == 0 else failed(f"error {runtime.last_error} is left")
    torch.cuda.init()
    arena = _Arena(64 * MIB)
    arena.touch()
    first = product.register_memory(arena.address, arena.size)
    answers = [product.register_memory(arena.address, arena.size), product.register_memory(1 << 46, 4096)]
    answers.append(product.unregister_memory(1 << 46))
    try:
        total = float((torch.ones(1024, device=context.device) * 2).sum().item())
    except RuntimeError as error:
        return failed(f"the next kernel raises {error}")
    if not first or any(answers) or total != 2048.0:
        return failed(f"first {first}, then {answers}; a kernel gives {total}")
    product.unregister_memory(arena.address)
    return Found("clean")


# -- snapshots
def _shard(context: Context, size: int) -> tuple[Any, dict[str, Any]]:
    """Layout and tensors of about ``size`` bytes, as many tensors as a model of 1.3 B parameters has."""
    import torch

    from rackrun.checkpoint.image.boxes import Box
    from rackrun.checkpoint.image.rank_image import Image
    from rackrun.checkpoint.image.safetensors_image import TensorEntry, plan_image

    count = context.pick(290, 12)
    each = size // count // 4
    tensors = {f"layer.{number}": torch.randn(each, device=context.device) for number in range(count)}
    entries = [TensorEntry(name, "float32", (each,), Box.whole((each,))) for name in tensors]
    return Image(plan_image(entries, 0), tensors, b""), tensors


def _snapshot(context: Context, *, pinned: bool) -> Found:
    import torch

    from rackrun.checkpoint.image.host_copies import copies_from

    shard, tensors = _shard(context, context.pick(8 * GIB, 16 * MIB))
    copies = copies_from(context.device)
    size = shard.layout.total_bytes
    arena = _Arena(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    arena.touch()
    if pinned:
        copies.pin(arena.address, arena.size)
    view = memoryview(arena.memory)[:size]

    def copy() -> None:
        copies.copy(shard, view, shard.tensors.keys(), copies.ready())

    took_s = _seconds(context, copy, 3)
    ends, wanted = time.monotonic() + (12 if pinned and not context.dry else 0), 0.85e9 * (_kept(context, "B2") or 50)
    while time.monotonic() < ends and size / took_s < wanted:  # memory may be registered beside the first copies
        took_s = min(took_s, _seconds(context, copy, 1))
    for name in list(tensors)[:: max(len(tensors) // 7, 1)]:
        start, stop = shard.layout.extents[name]
        found = torch.frombuffer(bytearray(view[start:stop]), dtype=torch.uint8)
        if not torch.equal(found, tensors[name].reshape(-1).view(torch.uint8).cpu()):
            return failed(f"the copy of {name} has other bytes")
    if pinned:
        copies.unpin(arena.address)
    return Found(size / took_s / 1e9, "GB/s")


@check("B5", "a snapshot of 8 GiB into a pinned arena", expected="right bytes; >= 0.85 of B2", limit_s=60)
def snapshot(context: Context) -> Found:
    found = _snapshot(context, pinned=True)
    bus_rate = _kept(context, "B2")
    if found.ok and bus_rate and isinstance(found.value, float):
        context.note(f"{found.value / bus_rate:.2f} of B2")
        if found.value < 0.5 * bus_rate:
            return failed("less than half of what the bus can: it is not pinned", found.value, found.unit)
    return found


@check(
    "B6",
    "the same into memory that is not pinned",
    expected="a figure, 10 to 16 GB/s",
    limit_s=60,
    must=False,
    not_dry="a figure of a GPU; B5 goes the same way",
)
def snapshot_unpinned(context: Context) -> Found:
    return _snapshot(context, pinned=False)


@check(
    "B7",
    "restore to the device: a pinned arena, one of another process",
    expected="right bytes; >= 0.85 of B2; a figure",
    limit_s=60,
)
def restore(context: Context) -> Found:
    import torch

    from rackrun.checkpoint.image.host_copies import copies_from
    from rackrun.checkpoint.image.safetensors_image import read_tensors, write_image

    shard, tensors = _shard(context, context.pick(4 * GIB, 16 * MIB))
    size, rates = shard.layout.total_bytes, {}
    host = {name: tensor.cpu() for name, tensor in tensors.items()}
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("pinned", "of another"):
        arena = _Arena(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        view = memoryview(arena.memory)[:size]
        write_image(shard.layout, host, shard.plain, view)
        copies = copies_from(context.device)
        if name == "pinned":
            copies.pin(arena.address, arena.size)
        for tensor in tensors.values():
            tensor.zero_()

        def read(view: memoryview = view, cuts: Any = copies.cuts) -> None:
            read_tensors(shard.layout, tensors, view, cuts=cuts)

        took_s = _seconds(context, read, 3)
        ends = time.monotonic() + (12 if name == "pinned" and not context.dry else 0)
        while time.monotonic() < ends and size / took_s < 0.85e9 * (_kept(context, "B2") or 50):
            took_s = min(took_s, _seconds(context, read, 1))  # memory may be registered beside the first copies
        rates[name] = size / took_s / 1e9
        if any(not torch.equal(tensors[one], wanted[one]) for one in tensors):
            return failed(f"what was restored from an arena ({name}) has other bytes")
        if name == "pinned":
            copies.unpin(arena.address)
    context.note(f"not pinned {rates['of another']:.1f} GB/s")
    return Found(rates["pinned"], "GB/s")


@check(
    "B12",
    "CheckpointManager: saves of state that changes at once; a restore, in memory and from disk",
    expected="right bytes",
    limit_s=60,
    beside=True,
)
def manager(context: Context) -> Found:
    import torch

    from rackrun.checkpoint import CheckpointManager, MemoryTier

    width, batch = context.pick(4096, 64), 64
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
    ).to(context.device)
    optimizer = torch.optim.AdamW(model.parameters())
    progress = {"step": 0}
    state = {"model": model, "optim": optimizer, "progress": progress}
    folders = context.folder / "durable", context.folder / "memory"

    def values() -> list[torch.Tensor]:
        of_optimizer = [value for each in optimizer.state.values() for value in each.values()]
        return [value.detach().clone() for value in (*model.state_dict().values(), *of_optimizer)]

    def step() -> None:
        optimizer.zero_grad()
        if not context.dry:
            torch.cuda._sleep(50_000_000)  # what is saved next is still being computed when `save` is called
        model(torch.randn(batch, width, device=context.device)).square().mean().backward()
        optimizer.step()
        progress["step"] += 1

    def restored(name: str, wanted: list[torch.Tensor], memory: MemoryTier | None) -> str:
        for value in values():
            value.zero_()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with CheckpointManager(folders[0], memory=memory) as checkpoints:
            checkpoints.prepare(state)
            report = checkpoints.restore()
        differ = sum(not torch.equal(one, other) for one, other in zip(values(), wanted, strict=True))
        return f"{name}: {differ} of {len(wanted)} tensors differ, of {report}" if differ else ""

    folders[1].mkdir()
    memory = MemoryTier(folders[1])
    checkpoints = CheckpointManager(folders[0], memory=memory, durable_every=4)
    checkpoints.prepare(state)
    checkpoints.restore()
    for _ in range(8):
        step()
        checkpoints.save(progress["step"])
        wanted = values()
        with torch.no_grad():  # a forward pass may change buffers as soon as `save` has returned
            model(torch.randn(batch, width, device=context.device))
    checkpoints.wait_until_finished()
    checkpoints.close(keep_memory=True)
    wrong = [restored("memory", wanted, memory), restored("disk", wanted, None)]
    wrong = [one for one in wrong if one]
    return failed("; ".join(wrong)) if wrong else Found("right", note="8 saves, 2 on disk")


# -- digests and kernels
@check(
    "B8",
    "digest: every bit, any address, several flips; rate",
    expected="512 of 512; 1,000 of 1,000; >= 0.85 TB/s",
    limit_s=60,
)
def digest(context: Context) -> Found:
    import torch

    from rackrun.worker.tensors.device_digest import BLOCK_WORDS, device_digest

    def of(flat: Any) -> int:
        return int(device_digest(flat))

    size = 3 * 4 * BLOCK_WORDS + 4004 + 3
    draws = random.Random(8)
    host = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = host.to(context.device)
    original = of(flat)
    words = [0, 1, 2047, 2048, 5000, size // 8 - 2, size // 8 - 1, size // 16]
    unseen = 0
    for word in words:
        for bit in range(64):
            flat[8 * word + bit // 8] ^= 1 << bit % 8
            unseen += of(flat) == original
            flat[8 * word + bit // 8] ^= 1 << bit % 8
    pairs = context.pick(1000, 300)
    missed = 0
    for _ in range(pairs):
        places = draws.sample(range(size), 2)
        bits = [draws.randrange(8), draws.randrange(8)]
        for place, bit in zip(places, bits, strict=True):
            flat[place] ^= 1 << bit
        missed += of(flat) == original
        for place, bit in zip(places, bits, strict=True):
            flat[place] ^= 1 << bit
    room = torch.empty(size + 16, dtype=torch.uint8, device=context.device)
    moved = 0
    for offset in range(16):
        view = room[offset : offset + size]
        view.copy_(flat)
        moved += of(view) != original
    if of(host) != original:
        return failed("the digest of the same bytes on the host is another")
    if unseen or missed or moved:
        return failed(f"{unseen} of 512 flips unseen, {missed} of {pairs} double flips, {moved} of 16 addresses differ")
    large = torch.empty(context.pick(8 * GIB, 8 * MIB), dtype=torch.uint8, device=context.device)
    rate = large.numel() / _seconds(context, lambda: device_digest(large), 3) / 1e12
    context.note(f"{'Triton' if _is_kernel(context) else 'torch'}; {pairs} double flips")
    return Found(rate, "TB/s", ok=context.dry or rate >= 0.85)


def _is_kernel(context: Context) -> bool:
    from rackrun.worker.tensors import device_digest as module

    find = getattr(module, "_block_sums", None)
    return find is not None and find(context.device) is not getattr(module, "_sums_by_torch", None)


@check(
    "B9",
    "exact reduction: bits against arithmetic in double; rate; host's cost",
    expected="0 differ; >= 0.80 of B1; <= 20 us",
    limit_s=90,
)
def exact(context: Context) -> Found:
    """As a bucket is reduced: values into sums (`add_segments`), and sums into values (`read_segments`), on tables that are there already."""
    import torch

    from rackrun.worker.exact.fixed_point import fixed_point
    from rackrun.worker.exact.parameter_segments import Factors, Segments

    arithmetic, device, scale = fixed_point(context.device), context.device, 2.0**14
    scales, inverses = Factors.all_of(device, [scale], [1 / scale])
    sizes = [1, 4095, 4096, 9000, context.pick(2**26 + 3, 2**17 + 3)]
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (torch.int32, torch.int64):
            marks = torch.zeros(1, dtype=width, device=device)
            for size in sizes:
                segments = Segments((0,), (size,))
                for offset in (0, 1, 3):
                    held = torch.randn(size + offset, device=device).to(dtype)
                    values = held[offset:]
                    sums = torch.zeros(size + offset, dtype=width, device=device)[offset:]
                    apart, largest = torch.zeros_like(sums), torch.zeros(1, device=device)
                    for fresh in (True, False):
                        arithmetic.add_segments(values, segments, scales, sums, largest, fresh=fresh)
                        arithmetic.add_apart([values], segments, scales, [apart], largest, fresh=fresh)
                    rounded = 2 * torch.round(values.double() * scale).to(width)
                    out = torch.empty(size + offset, dtype=dtype, device=device)[offset:]
                    arithmetic.read_segments(sums, segments, inverses, marks, out)
                    wanted = (rounded.to(torch.float32) * (1 / scale)).to(dtype)
                    if not (torch.equal(sums, rounded) and torch.equal(apart, rounded) and torch.equal(out, wanted)):
                        wrong.append(f"{dtype} into {width}, {size} at {offset}")
                    if float(largest) != float(values.abs().max()):
                        wrong.append(f"largest of {dtype}, {size} at {offset}")
    if wrong:
        return failed(f"{len(wrong)} differ: {'; '.join(wrong[:4])}")
    count = context.pick(2**28, 2**18)
    values, sums = torch.randn(count, device=device), torch.zeros(count, dtype=torch.int32, device=device)
    segments, marks = Segments((0,), (count,)), torch.zeros(1, dtype=torch.int32, device=device)

    def add(*, fresh: bool = True) -> None:
        arithmetic.add_segments(values, segments, scales, sums, largest, fresh=fresh)

    def rate(work: Callable[[], None]) -> float:
        return float(8 * count / _seconds(context, work, calls=_CALLS) / 1e12)

    adds = rate(add)
    aparts = rate(lambda: arithmetic.add_apart([values], segments, scales, [sums], largest, fresh=True))
    reads = rate(lambda: arithmetic.read_segments(sums, segments, inverses, marks, values))
    values, sums, segments = values[:4096], sums[:4096], Segments((0,), (4096,))
    add()
    _idle(context)
    began = time.perf_counter()
    for _ in range(200):
        add(fresh=False)
    host_us = 1e6 * (time.perf_counter() - began) / 200
    _idle(context)
    context.note(
        f"{type(arithmetic).__name__}; apart {aparts:.2f}, back {reads:.2f} TB/s; {host_us:.1f} us of the host"
    )
    of_copy = _kept(context, "B1")
    if of_copy is not None:
        context.note(f"{min(adds, reads) / of_copy:.2f} of B1")
    quick = context.dry or of_copy is None or min(adds, reads) >= 0.8 * of_copy
    return Found(adds, "TB/s", ok=quick)


@check(
    "B10",
    "the device writes into shared memory behind a kernel",
    expected="<= 10 us; <= 4 us host",
    limit_s=40,
    must=False,
    not_dry="only a device writes behind a kernel",
)
def progress_stamp(context: Context) -> Found:
    import torch

    from rackrun.checkpoint.host_memory.host_registration import register_memory

    torch.cuda.init()
    driver = ctypes.CDLL("libcuda.so.1")
    write = getattr(driver, "cuStreamWriteValue32_v2", None)
    if write is None:
        raise Skip("libcuda has no cuStreamWriteValue32_v2")
    write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    arena = _Arena(mmap.PAGESIZE)
    arena.touch()
    if not register_memory(arena.address, arena.size):
        return failed("a page of shared memory cannot be registered")
    pointer = ctypes.c_uint64()
    driver.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(arena.address), 0)
    stream = torch.cuda.current_stream().cuda_stream
    word = ctypes.c_uint32.from_address(arena.address)
    torch.cuda.synchronize()
    costs, latencies = [], []
    for number in range(1, 201):
        torch.cuda._sleep(20_000)
        event = torch.cuda.Event()
        event.record()
        began = time.perf_counter()
        code = write(stream, pointer.value or arena.address, number, 0)
        costs.append(time.perf_counter() - began)
        if code:
            raise Skip(f"cuStreamWriteValue32 gives error {code}")
        while not event.query():
            pass
        passed = time.perf_counter()
        while word.value != number:
            if time.perf_counter() - passed > 1:
                return failed("the word has not come 1 s after the kernel")
        latencies.append(time.perf_counter() - passed)
    reader = f"import mmap, os; print(int.from_bytes(mmap.mmap(os.open('/proc/{os.getpid()}/fd/{arena.fd}', os.O_RDWR), 4096)[:4], 'little'))"
    seen = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, timeout=20, check=False)
    if seen.stdout.strip() != "200":
        return failed(f"another process sees {seen.stdout.strip() or seen.stderr[-200:]}, not 200")
    host_us, device_us = 1e6 * statistics.median(costs), 1e6 * statistics.median(latencies)
    context.note(f"{host_us:.1f} us of the host a call")
    return Found(device_us, "us", ok=device_us <= 10 and host_us <= 4)


@check(
    "B11",
    "events, and eight bytes to the host",
    expected="<= 15 us to the host",
    limit_s=40,
    must=False,
    not_dry="of the device's own queue",
)
def events(context: Context) -> Found:
    import torch

    pinned, value = (
        torch.empty(1, dtype=torch.float64, pin_memory=True),
        torch.ones(1, dtype=torch.float64, device=context.device),
    )

    def fetch() -> float:
        began = time.perf_counter()
        pinned.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass
        return time.perf_counter() - began

    fetched_us = 1e6 * statistics.median([fetch() for _ in range(500)])
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(1000):
        event.query()
    query_us = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(1000):
        torch.cuda.current_stream().wait_event(event)
    wait_us = 1e3 * (time.perf_counter() - began)
    context.note(f"query {query_us:.2f} us, wait_event {wait_us:.2f} us")
    return Found(fetched_us, "us", ok=fetched_us <= 15)
