"""C: the seam between torch's collectives and ours: what a communicator of NCCL's does when it is built, used and left, and what scripts get."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import memory
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, check, failed
from benchmarks.gpu.scripts.common import DOUBLE_AT

__all__: list[str] = []

_OF_NCCL = "what NCCL's own communicator does; the double has none"


_TOGETHER = (
    "synchronous",
    "asynchronous",
    "enqueue_cost",
    "objects",
    "barrier",
    "host_tensor",
    "checkpoint",
    "any_source",
)
_NOT_DRY = ("wrong_dtype", "out_of_memory", "captured")
Cases = dict[tuple[str, int], dict[str, Any]]


def cases(context: Context, names: Sequence[str]) -> Cases:
    """``scripts/contract.py``: (case, rank) -> what that rank has written. The first check that asks has all cases tried in one job; one that has no
    answer there, because the job went before it, is tried in a job of its own."""
    kept = context.shared / "contract.json"
    if not kept.exists():
        kept.write_text(json.dumps(_lines(context, [*_TOGETHER, *context.pick(_NOT_DRY, ())], name="all")))
    found = _by_case(json.loads(kept.read_text()))
    if all((case, rank) in found for case in names for rank in range(2)):
        return found
    context.note("tried in a job of its own: the job of all cases had no answer")
    return _answered(_by_case(_lines(context, names)), names)


def _lines(context: Context, names: Sequence[str], *, double: str = "late", name: str = "job") -> list[dict[str, Any]]:
    with Job(context, name, "contract.py", ["--cases", ",".join(names)], ranks=2, double=double) as job:
        if name == "all":
            with contextlib.suppress(RuntimeError):
                job.finish(within_s=context.limit_s / 2)  # the other half is for a job of its own
            return job.lines()
        return job.finish()


def _by_case(lines: Sequence[dict[str, Any]]) -> Cases:
    return {(one["case"], one["rank"]): one for one in lines if one["what"] == "case"}


def _answered(found: Cases, names: Sequence[str]) -> Cases:
    return {(case, rank): found.get((case, rank), {"says": "no answer"}) for case in names for rank in range(2)}


def _asked(context: Context, names: Sequence[str]) -> Cases:
    return _answered(cases(context, names), names)


def _judged(found: Cases) -> Found:
    wrong = [f"{case} on rank {rank}: {one['says']}" for (case, rank), one in found.items() if one["says"] != "ok"]
    notes = sorted({f"{case}: {one['note']}" for (case, _), one in found.items() if one.get("note")})
    if wrong:
        return failed("; ".join(wrong), len(found) - len(wrong), f"of {len(found)}")
    return Found(len(found), f"of {len(found)}", "; ".join(notes))


@check(
    "C1",
    "build, use, break, again, in one process",
    expected="first <= 3 s, then p50 <= 0.5 s; nothing leaks",
    limit_s=75,
)
def cycles(context: Context) -> Found:
    count = context.pick(20, 6)
    with Ranks(context, "nccl:cycling", 2, {"count": count}) as ranks:
        told = ranks.answer(0)
        ranks.answer(1)
    first_s, p50_s = told["took_s"][0], statistics.median(told["took_s"][1:])
    left = told["left"]
    leaks = [f"{left[what]} {what}" for what in ("threads", "descriptors") if left[what] > 0]
    if left["memory"] > 8 * 2**20:
        leaks.append(f"{left['memory'] / 2**20:.0f} MiB of the device")
    context.note(f"first {first_s:.2f} s")
    slow = not context.dry and (first_s > 3.0 or p50_s > 0.5)
    return Found(p50_s, "s", f"left over: {', '.join(leaks)}" if leaks else "", ok=not leaks and not slow)


def cycling(rank: Rank) -> dict[str, Any]:
    """Build, sum, break and drop, ``count`` times or for ``seconds``: how long each took until the sum was there, and what is left over."""
    import torch

    from benchmarks.gpu import seams

    took: list[float] = []
    before: dict[str, int] = {}
    ends = time.monotonic() + rank.given.get("seconds", float("inf"))
    for number in range(rank.given["count"]):
        if rank.rank == 0 and time.monotonic() > ends:
            rank.say(f"enough-{number}")
        rank.meet(f"cycle-{number}")
        if rank.said(f"enough-{number}"):
            break
        began = time.monotonic()
        communicator = rank.communicator(f"cycle-{number}")
        tensor = torch.ones(1024, device=rank.device)
        communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        seams.quiet_after(rank.device, 20)
        took.append(time.monotonic() - began)
        if float((tensor + 0)[0].item()) != float(rank.size):
            raise AssertionError(f"the sum of cycle {number} is {float(tensor[0])}, not {rank.size}")
        rank.meet(f"summed-{number}")
        communicator.break_()
        communicator.drop()
        if rank.device.type == "cpu" and hasattr(communicator.inner, "close"):
            communicator.inner.close()  # the double's own thread
        del communicator
        if number == 2:  # what the first ones made stays for good
            before = _held(rank)
    after = _held(rank)
    return {"took_s": took, "left": {what: after[what] - before[what] for what in before}}


def _held(rank: Rank) -> dict[str, int]:
    """Lowest of half a second: what is closed by threads of the library takes a moment."""
    import gc

    import torch

    gc.collect()
    counts = []
    for _ in range(25):
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        time.sleep(0.02)
    held = 0
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        own = memory.of_process(os.getpid())
        held = memory.used() if own is None else own
    return {"threads": min(one for one, _ in counts), "descriptors": min(one for _, one in counts), "memory": held}


@check("C2", "a synchronous and an asynchronous call", expected="a Work from the group; right sums", limit_s=80)
def returns(context: Context) -> Found:
    return _judged(_asked(context, ["synchronous", "asynchronous"]))


@check("C3", "host cost of a call: elastic less bare", expected="<= 15 us more", limit_s=80, must=False)
def enqueue_cost(context: Context) -> Found:
    told = _asked(context, ["enqueue_cost"])["enqueue_cost", 0]
    if told["says"] != "ok":
        return failed(told["says"])
    if told["bare_us"] is None:
        return Found(told["elastic_us"], "us", "of the elastic group; there is nothing below it to be compared with")
    more = told["elastic_us"] - told["bare_us"]
    return Found(
        more, "us", f"elastic {told['elastic_us']:.0f}, bare {told['bare_us']:.0f}", ok=context.dry or more <= 15
    )


@check(
    "C4",
    "two groups at once, begun in opposite order by two ranks",
    expected="both ready <= 3 s; no thread held up for more than 0.5 s",
    limit_s=60,
)
def ready(context: Context) -> Found:
    """Each group is built in a thread of its own. Whoever waits for NCCL must let Python's other threads run: they read the ids for the other group,
    and hear of breaks."""
    with Ranks(context, "nccl:side_by_side", 2) as ranks:
        answers = ranks.answers()
    ready_s, held_up_s = (max(one[what] for one in answers) for what in ("ready_s", "held_up_s"))
    context.note(f"a thread was held up for {held_up_s:.2f} s at most")
    return Found(ready_s, "s", ok=context.dry or (ready_s <= 3.0 and held_up_s <= 0.5))


def side_by_side(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    built: dict[str, Any] = {}
    held_up = [0.0]
    over = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.wait(0.01):
            now = time.monotonic()
            held_up[0], last = max(held_up[0], now - last), now

    def build(name: str) -> None:
        built[name] = rank.communicator(name)

    names = ["one", "other"][:: 1 if rank.rank == 0 else -1]
    threads = [threading.Thread(target=build, args=[name]) for name in names]
    ticking = threading.Thread(target=tick)
    ticking.start()
    rank.meet("begins")
    began = time.monotonic()
    threads[0].start()
    time.sleep(0.2)  # by far in front: what only one of them can have is its own by now
    threads[1].start()
    for thread in threads:
        thread.join()
    ready_s = time.monotonic() - began - 0.2
    over.set()
    ticking.join()
    for name in sorted(names):
        tensor = torch.ones(8, device=rank.device)
        built[name].call("allreduce", [tensor], seams.asynchronous()).wait()
        if float((tensor + 0)[0].item()) != 2.0:
            raise AssertionError(f"the sum of group {name} is {float(tensor[0])}, not 2")
    rank.meet("over")
    return {"ready_s": ready_s, "held_up_s": held_up[0]}


@check("C5", "objects, barrier, tensors of the host, torch.distributed.checkpoint", expected="all work", limit_s=60)
def host_side(context: Context) -> Found:
    return _judged(_asked(context, ["objects", "barrier", "host_tensor", "checkpoint"]))


@check("C6", "misuse: any source, a wrong dtype, no memory", expected="typed errors; the generation stays", limit_s=60)
def misuse(context: Context) -> Found:
    """The hosts' transport looks at types, and has a receive from any source; the double has neither."""
    names = ["wrong_dtype", "out_of_memory"]
    if not context.dry:
        return _judged(_asked(context, [*names, "any_source"]))
    found = _answered(_by_case(_lines(context, names, double="")), names)
    return _judged({**found, **(_asked(context, ["any_source"]) if DOUBLE_AT.exists() else {})})


@check(
    "C7",
    "a collective in the capture of a CUDA graph",
    expected="refused by a typed error",
    limit_s=45,
    must=False,
    not_dry="graphs are of GPUs",
)
def capture(context: Context) -> Found:
    return _judged(_asked(context, ["captured"]))


@check(
    "C15",
    "host cost of a call: NCCL's non-blocking mode over its blocking one",
    expected="a figure",
    limit_s=45,
    must=False,
    not_dry=_OF_NCCL,
)
def modes_of_nccl(context: Context) -> Found:
    """Of torch's own groups. rackrun uses the blocking mode: in the other NCCL starts a thread for each call (`rackrun.worker.communicators.nccl`)."""
    with Ranks(context, "nccl:in_both_modes", 2) as ranks:
        told = ranks.answers()[0]
    context.note(f"blocking {told['blocking']:.0f} us, non-blocking {told['non-blocking']:.0f} us")
    return Found(told["non-blocking"] / told["blocking"], "times")


def in_both_modes(rank: Rank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from benchmarks.gpu import seams

    host, _, port = rank.address.rpartition(":")
    tensor = torch.ones(1024, device=rank.device)
    took_us: dict[str, float] = {}
    for name, blocking in (("blocking", 1), ("non-blocking", 0)):
        store = dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = blocking
        group: Any = dist.ProcessGroupNCCL(store, rank.rank, rank.size, options)
        _KEPT.append((store, group))
        times = []
        for number in range(320):
            began = time.perf_counter()
            work = group.allreduce([tensor], seams.asynchronous())
            times.append(time.perf_counter() - began)
            work.wait()
            if number % 20 == 19:
                torch.cuda.synchronize()
        took_us[name] = 1e6 * statistics.median(times[20:])
        rank.meet(name)
    return took_us


_KEPT: list[Any] = []
"""The process ends without destructors."""
