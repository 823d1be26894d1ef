"""C: the seam between torch's collectives and ours: what a communicator of NCCL's does when it is built, used and left, and what scripts get."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.jobs import Job
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, check, failed
from benchmarks.gpu.scripts.common import DOUBLE_AT

__all__ = ["cases"]

_OF_NCCL = "what NCCL's own communicator does; the double has none"


def cases(
    context: Context, names: Sequence[str], ranks: int = 2, *, double: str = "late", name: str = "job"
) -> dict[tuple[str, int], dict[str, Any]]:
    """``scripts/contract.py``: (case, rank) -> what that rank has written."""
    with Job(context, name, "contract.py", ["--cases", ",".join(names)], ranks=ranks, double=double) as job:
        lines = job.finish()
    found = {(one["case"], one["rank"]): one for one in lines if one["what"] == "case"}
    for case in names:
        for rank in range(ranks):
            found.setdefault((case, rank), {"says": "no answer"})
    return found


def _judged(found: dict[tuple[str, int], dict[str, Any]]) -> Found:
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
    leaks = [f"{told[what]} {what}" for what in ("threads", "descriptors") if told[what] > 0]
    if told["memory_mib"] > 8:
        leaks.append(f"{told['memory_mib']:.0f} MiB of the device")
    context.note(f"first {first_s:.2f} s")
    slow = not context.dry and (first_s > 3.0 or p50_s > 0.5)
    return Found(p50_s, "s", f"left over: {', '.join(leaks)}" if leaks else "", ok=not leaks and not slow)


def cycling(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    took, before = [], {}
    for number in range(rank.given["count"]):
        began = time.monotonic()
        communicator = rank.communicator(f"cycle-{number}")
        tensor = torch.ones(1024, device=rank.device)
        communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        seams.quiet_after(rank.device, 20)
        took.append(time.monotonic() - began)
        if float((tensor + 0)[0].item()) != 2.0:
            raise AssertionError(f"the sum of cycle {number} is {float(tensor[0])}, not 2")
        rank.say(f"summed-{number}-{rank.rank}")
        rank.wait_for(f"summed-{number}-{1 - rank.rank}")
        communicator.break_()
        communicator.drop()
        if hasattr(communicator.inner, "close"):
            communicator.inner.close()  # the double's own thread
        del communicator
        if number == 2:  # what the first ones made stays for good
            before = _held(rank)
    after = _held(rank)
    memory = (after["memory"] - before["memory"]) / 2**20
    return {
        "took_s": took,
        "memory_mib": memory,
        "threads": after["threads"] - before["threads"],
        "descriptors": after["descriptors"] - before["descriptors"],
    }


def _held(rank: Rank) -> dict[str, int]:
    """Lowest of half a second: what is closed by threads of the library takes a moment."""
    import gc

    import torch

    gc.collect()
    counts = []
    for _ in range(25):
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        time.sleep(0.02)
    used = 0
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info(rank.device)
        used = whole - free
    return {"threads": min(one for one, _ in counts), "descriptors": min(one for _, one in counts), "memory": used}


@check("C2", "a synchronous and an asynchronous call", expected="a Work from the group; right sums", limit_s=45)
def returns(context: Context) -> Found:
    return _judged(cases(context, ["synchronous", "asynchronous"]))


@check("C3", "host cost of a call: elastic less bare", expected="<= 15 us more", limit_s=45, must=False)
def enqueue_cost(context: Context) -> Found:
    told = cases(context, ["enqueue_cost"])["enqueue_cost", 0]
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
    "_comm_ptr() waits until the communicator is ready; blocking and not",
    expected="both ready, <= 3 s",
    limit_s=60,
    not_dry=_OF_NCCL,
)
def ready(context: Context) -> Found:
    with Ranks(context, "nccl:initialised", 2) as ranks:
        answers = ranks.answers()
    told = answers[0]
    context.note(f"non-blocking: constructor {told['built_s']:.2f} s, ready after {told['ready_s']:.2f} s")
    context.note(f"blocking {told['blocking_s']:.2f} s")
    if not told["pointer"]:
        return failed("ProcessGroupNCCL has no _comm_ptr")
    return Found(told["ready_s"], "s", ok=told["ready_s"] <= 3.0)


def initialised(rank: Rank) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank.device)
    host, _, port = rank.address.rpartition(":")
    real = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    took = {}
    pointer = True
    for name, blocking in (("ready_s", 0), ("blocking_s", 1)):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=30)
        options.config.blocking = blocking
        began = time.monotonic()
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, real), rank.rank, rank.size, options)
        group.eager_connect_single_device(rank.device)
        if not blocking:
            took["built_s"] = time.monotonic() - began
            pointer = hasattr(group, "_comm_ptr")
        if pointer:
            group._comm_ptr()
        took[name] = time.monotonic() - began
        tensor = torch.ones(8, device=rank.device)
        group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        rank.say(f"summed-{name}-{rank.rank}")
        rank.wait_for(f"summed-{name}-{1 - rank.rank}")
        group.abort()
    return {**took, "pointer": pointer}


@check("C5", "objects, barrier, tensors of the host, torch.distributed.checkpoint", expected="all work", limit_s=50)
def host_side(context: Context) -> Found:
    return _judged(cases(context, ["objects", "barrier", "host_tensor", "checkpoint"]))


@check("C6", "misuse: any source, a wrong dtype, no memory", expected="typed errors; the generation stays", limit_s=50)
def misuse(context: Context) -> Found:
    """The hosts' transport looks at types, and has a receive from any source; the double has neither."""
    if not context.dry:
        return _judged(cases(context, ["wrong_dtype", "out_of_memory", "any_source"]))
    if not DOUBLE_AT.exists():
        return _judged(cases(context, ["wrong_dtype", "out_of_memory"], double=""))
    found = cases(context, ["wrong_dtype", "out_of_memory"], double="")
    return _judged({**found, **cases(context, ["any_source"], name="of-the-double")})


@check(
    "C7",
    "a collective in the capture of a CUDA graph",
    expected="refused by a typed error",
    limit_s=45,
    must=False,
    not_dry="graphs are of GPUs",
)
def capture(context: Context) -> Found:
    return _judged(cases(context, ["captured"]))
