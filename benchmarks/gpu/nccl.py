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

from benchmarks.gpu.jobs import Job
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, Skip, check, failed
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
    used = 0
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info(rank.device)
        used = whole - free
    return {"threads": min(one for one, _ in counts), "descriptors": min(one for _, one in counts), "memory": used}


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
        rank.meet(f"summed-{name}")
        group.abort()
    return {**took, "pointer": pointer}


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


# -- what the runtime relies on, and nobody has yet seen on a GPU
@check(
    "C8",
    "nccl2: shutdown() after an abort, and once more; the next communicator",
    expected="returns <= 5 s; right sums",
    limit_s=60,
    not_dry=_OF_NCCL,
)
def shutdown_after_abort(context: Context) -> Found:
    """`rackrun.worker.nccl.Nccl2` breaks by the one and frees by the other."""
    import torch.distributed as dist

    if not hasattr(dist, "ProcessGroupNCCL2"):
        raise Skip("this torch has no nccl2: it came with 2.14")
    env = {"RACKRUN_NCCL_BACKEND": "nccl2"}
    with Ranks(context, "nccl:aborted_and_shut_down", 2, {"rounds": 5}, env=env) as ranks:
        answers = ranks.answers()
    slowest_s = max(one for answer in answers for one in answer["shutdown_s"])
    context.note(f"abort() {max(one for answer in answers for one in answer['abort_s']):.3f} s")
    return Found(slowest_s, "s", ok=slowest_s <= 5.0)


def aborted_and_shut_down(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    took: dict[str, list[float]] = {"abort_s": [], "shutdown_s": []}
    for number in range(rank.given["rounds"]):
        communicator = rank.communicator(f"round-{number}")
        tensor = torch.ones(4096, device=rank.device)
        communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        torch.cuda.synchronize()
        if float(tensor[0].item()) != 2.0:
            raise AssertionError(f"the sum of round {number} is {float(tensor[0])}, not 2")
        rank.meet(f"summed-{number}")
        if rank.rank == 0:  # a sum that its peer does not come to is in flight
            communicator.call("allreduce", [tensor], seams.asynchronous())
        for name, call in (
            ("abort_s", communicator.inner.abort),
            ("shutdown_s", communicator.inner.shutdown),
            ("shutdown_s", communicator.inner.shutdown),
        ):
            began = time.monotonic()
            call()
            took[name].append(time.monotonic() - began)
        if seams.quiet_after(rank.device, 10) is None:
            raise AssertionError(f"the device was not quiet 10 s after abort and shutdown of round {number}")
        rank.meet(f"over-{number}")
    return took


@check(
    "C9",
    "synchronize() of the device, beside a break",
    expected="returns <= 0.5 s after it",
    limit_s=60,
    not_dry=_OF_NCCL,
)
def synchronised_beside_break(context: Context) -> Found:
    """A worker that leaves a generation waits for its device in one thread while another one revokes."""
    with Ranks(context, "nccl:synchronises", 2, {"rounds": 5}) as ranks:
        told = ranks.answer(0)
        ranks.answer(1)
    late = [one for one in told["after_s"] if one is None]
    if late:
        return failed(f"synchronize() did not return within 10 s of {len(late)} breaks")
    context.note(f"next sum {max(told['next_s']):.2f} s later, with a new communicator")
    return Found(max(told["after_s"]), "s", ok=max(told["after_s"]) <= 0.5)


def synchronises(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    after: list[float | None] = []
    following: list[float] = []
    for number in range(rank.given["rounds"]):
        began = time.monotonic()
        communicator = rank.communicator(f"round-{number}")
        tensor = torch.ones(2**20, device=rank.device)
        communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        torch.cuda.synchronize()
        following.append(time.monotonic() - began)
        rank.meet(f"summed-{number}")
        if rank.rank == 0:
            communicator.call("allreduce", [tensor], seams.asynchronous()).wait()  # its peer does not come
            returned: list[float] = []

            def waits(number: int = number, returned: list[float] = returned) -> None:
                torch.cuda.set_device(rank.device)
                rank.say(f"waits-{number}")
                torch.cuda.synchronize()
                returned.append(time.monotonic())

            thread = threading.Thread(target=waits, daemon=True)
            thread.start()
            rank.wait_for(f"waits-{number}")
            time.sleep(0.2)  # it is inside by now; if it is not, the check is as true
            if returned:
                raise AssertionError("synchronize() has returned, with a sum in flight that nobody can end")
            broke = time.monotonic()
            communicator.break_()
            thread.join(10)
            after.append(returned[0] - broke if returned else None)
        rank.meet(f"broken-{number}")
        communicator.drop()
    return {"after_s": after, "next_s": following[1:]}


@check(
    "C10",
    "is_completed() by another thread while calls are enqueued",
    expected="no error; what is over stays so",
    limit_s=60,
)
def asked_beside(context: Context) -> Found:
    """The control thread asks how far the device is (`rackrun.worker.progress`): here without a pause, which also takes Python's lock from the
    main thread, so that the cost of a call is only noted."""
    with Ranks(context, "nccl:asks", 2, {"calls": context.pick(3000, 60)}) as ranks:
        told = ranks.answers()[0]
    if told["said"] or told["fell_back"]:
        return failed(told["said"] or f"{told['fell_back']} works were over, and then were not")
    if not told["asked"]:
        return failed("nobody asked while calls were enqueued: nothing was proved")
    more = told["asked_us"] - told["alone_us"]
    context.note(
        f"{told['asked']} times asked; a call {told['alone_us']:.0f} us alone, {told['asked_us']:.0f} beside it"
    )
    return Found(more, "us")


def asks(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams
    from rackrun.worker.device_queue import queue_of

    communicator = rank.communicator("asks")
    tensor = torch.ones(1024, device=rank.device)
    works: list[tuple[int, Any]] = []
    over: set[int] = set()
    told: dict[str, Any] = {"said": "", "fell_back": 0, "asked": 0}
    stop = threading.Event()

    def control() -> None:
        queue_of(rank.device).use()
        try:
            while not stop.is_set():
                for number, work in tuple(works):
                    completed = work.is_completed()
                    told["asked"] += 1
                    told["fell_back"] += number in over and not completed
                    if completed:
                        over.add(number)
        except Exception as error:  # noqa: BLE001 - whichever it is, it is what is asked
            told["said"] = f"{type(error).__name__}: {error}"

    def enqueue() -> float:
        times = []
        for number in range(rank.given["calls"]):
            tensor.fill_(1.0)
            began = time.perf_counter()
            work = communicator.call("allreduce", [tensor], seams.asynchronous())
            times.append(time.perf_counter() - began)
            works.append((number, work))
            work.wait()
            if len(works) > 64:  # the oldest are asked no more, as in a worker
                del works[:32]
        seams.quiet_after(rank.device, 20)
        return 1e6 * statistics.median(times)

    told["alone_us"] = enqueue()
    works.clear()
    thread = threading.Thread(target=control, name="control")
    thread.start()
    told["asked_us"] = enqueue()
    stop.set()
    thread.join()
    if float((tensor + 0)[0].item()) != 2.0:
        told["said"] = told["said"] or f"the last sum is {float(tensor[0])}, not 2"
    rank.meet("over")
    return told


@check(
    "C11",
    "callbacks of the engine at the end of a backward pass under DDP",
    expected="after DDP's own, in the caller's thread and stream",
    limit_s=60,
)
def engine_callbacks(context: Context) -> Found:
    """A callback that a hook queues is called when all is computed; one that it queues then, behind DDP's, which waits for all buckets. The
    worker's own time rests on both (`rackrun.worker.own_time`)."""
    with Ranks(context, "nccl:calls_back", 2, double="") as ranks:
        answers = ranks.answers()
    wrong = [f"rank {rank}: {what}" for rank, answer in enumerate(answers) for what in answer["wrong"]]
    return failed("; ".join(wrong[:4])) if wrong else Found(answers[0]["passes"], "passes")


def calls_back(rank: Rank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.autograd import Variable
    from torch.nn.parallel import DistributedDataParallel

    host, _, port = rank.address.rpartition(":")
    store = dist.PrefixStore("ddp", dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    dist.init_process_group("nccl" if rank.device.type == "cuda" else "gloo", store=store, rank=rank.rank, world_size=2)
    on_gpu = rank.device.type == "cuda"
    stream: Any = torch.cuda.Stream(rank.device) if on_gpu else None  # not the default one: which it is can be told
    wrong: list[str] = []
    passes = 4
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(rank.device))
        first, last = next(model.parameters()), list(model.parameters())[-1]
        for number in range(passes):
            order: list[str] = []
            seen: dict[str, Any] = {}
            caller = threading.get_ident()

            def look(name: str, order: list[str] = order, caller: int = caller) -> None:
                order.append(name)
                if threading.get_ident() != caller:
                    wrong.append(f"{name} was called in another thread")
                if on_gpu and torch.cuda.current_stream(rank.device) != stream:
                    wrong.append(f"{name} was called in another stream")

            def over(look: Any = look, seen: dict[str, Any] = seen) -> None:
                look("over")
                seen["first"], seen["last"] = first.grad.clone(), last.grad.clone()  # in the stream, as it is now

            def computed(look: Any = look, over: Any = over) -> None:
                look("computed")
                Variable._execution_engine.queue_callback(over)

            def hook(_: Any, order: list[str] = order, computed: Any = computed) -> None:
                order.append("hook")
                Variable._execution_engine.queue_callback(computed)

            handle = last.register_hook(hook)  # the first whose gradient is computed
            model.zero_grad()
            x = torch.full((8, 256), float(rank.rank + number + 1), device=rank.device)
            model(x).square().mean().backward()
            handle.remove()
            if order != ["hook", "computed", "over"]:
                wrong.append(f"pass {number}: the order was {order}")
                break
            after = first.grad.clone(), last.grad.clone()  # type: ignore[union-attr]
            for name, now in zip(("first", "last"), after, strict=True):
                if not torch.equal(seen[name], now):
                    wrong.append(f"pass {number}: the {name} gradient was not summed yet")
                both = [torch.empty_like(now) for _ in range(2)]
                dist.all_gather(both, now)
                if not torch.equal(both[0], both[1]):
                    wrong.append(f"pass {number}: the {name} gradient is not that of the other rank")
    rank.meet("over")
    _KEPT.append(model)
    return {"wrong": wrong, "passes": passes}


_KEPT: list[Any] = []
"""The process ends without destructors."""


@check(
    "C12",
    "events asked for by another thread, beside the capture of a graph",
    expected="the capture holds; right values",
    limit_s=60,
    not_dry="graphs are of GPUs",
)
def capture_beside(context: Context) -> Found:
    """`rackrun.checkpoint.device.use_device` gives each thread its own mode of capture; without it such a question ends the other's capture."""
    import torch

    from rackrun.checkpoint.device import use_device

    found = {}
    for name, prepare in (("with", use_device), ("without", torch.cuda.set_device)):
        found[name] = _captured_beside(context.device, prepare)
    context.note(f"without it: {found['without'] or 'holds too'}")
    return failed(found["with"]) if found["with"] else Found("holds")


def _captured_beside(device: Any, prepare: Any) -> str:
    """What goes wrong. "": nothing."""
    import torch

    asked, stop = threading.Event(), threading.Event()
    errors: list[str] = []

    def control() -> None:
        prepare(device)
        stream = torch.cuda.Stream(device)
        while not stop.is_set():
            try:
                event = torch.cuda.Event()
                event.record(stream)
                event.query()
            except RuntimeError as error:
                errors.append(f"the thread that asks: {str(error).splitlines()[0]}")
                return
            finally:
                asked.set()

    values = torch.zeros(1024, device=device)
    values += 1  # kernels are loaded
    torch.cuda.synchronize()
    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=control, daemon=True)
    try:
        with torch.cuda.graph(graph):
            thread.start()
            asked.wait(10)
            for _ in range(200):
                values += 1
            asked.clear()
            asked.wait(1)  # once more, in the middle of it
        graph.replay()
        torch.cuda.synchronize()
        if float(values[0].item()) != 201.0:
            errors.append(f"the graph gives {float(values[0])}, not 201")
    except RuntimeError as error:
        errors.append(f"the capture: {str(error).splitlines()[0]}")
    finally:
        stop.set()
        thread.join(10)
    return "; ".join(errors)
