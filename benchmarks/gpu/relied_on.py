"""C, from C8 on: what the runtime relies on, and nobody has yet seen on a GPU."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import Any

from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, Skip, check, failed

__all__: list[str] = []

_OF_NCCL = "what NCCL's own communicator does; the double has none"


@check(
    "C8",
    "nccl2: shutdown() after an abort, and once more; the next communicator",
    expected="returns <= 5 s; right sums",
    limit_s=60,
    not_dry=_OF_NCCL,
)
def shutdown_after_abort(context: Context) -> Found:
    """`rackrun.worker.communicators.nccl.Nccl2` breaks by the one and frees by the other."""
    import torch.distributed as dist

    if not hasattr(dist, "ProcessGroupNCCL2"):
        raise Skip("this torch has no nccl2: it came with 2.14")
    env = {"RACKRUN_NCCL_BACKEND": "nccl2"}
    with Ranks(context, "relied_on:aborted_and_shut_down", 2, {"rounds": 5}, env=env) as ranks:
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
    with Ranks(context, "relied_on:synchronises", 2, {"rounds": 5}) as ranks:
        told = ranks.answer(0)
        ranks.answer(1)
    late = [one for one in told["after_s"] if one is None]
    if late:
        return failed(f"synchronize() did not return within 10 s of {len(late)} breaks")
    context.note(f"the next call was refused in {max(told['refused_s']):.2f} s")
    context.note(f"next sum {max(told['next_s']):.2f} s later, with a new communicator")
    return Found(max(told["after_s"]), "s", ok=max(told["after_s"]) <= 0.5)


def synchronises(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    after: list[float | None] = []
    following: list[float] = []
    refused: list[float] = []
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
            asked = time.monotonic()
            try:
                communicator.call("allreduce", [tensor], seams.asynchronous())
            except RuntimeError:
                refused.append(time.monotonic() - asked)
            else:
                raise AssertionError("a call was taken after the break")
        rank.meet(f"broken-{number}")
        communicator.drop()
    return {"after_s": after, "next_s": following[1:], "refused_s": refused}


@check(
    "C10",
    "is_completed() by another thread while calls are enqueued",
    expected="no error; what is over stays so",
    limit_s=60,
)
def asked_beside(context: Context) -> Found:
    """The control thread asks how far the device is (`rackrun.worker.membership.collective_progress`): here without a pause, which also takes Python's lock from the
    main thread, so that the cost of a call is only noted."""
    with Ranks(context, "relied_on:asks", 2, {"calls": context.pick(300, 60)}) as ranks:
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
    from rackrun.worker.device.device_queue import queue_of

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
    expected="after DDP's own, in the caller's stream",
    limit_s=60,
)
def engine_callbacks(context: Context) -> Found:
    """A callback that a hook queues is called when all is computed; one that it queues then, behind DDP's, which waits for all buckets. The
    worker's own time rests on both (`rackrun.worker.device.own_time`)."""
    with Ranks(context, "relied_on:calls_back", 2, double="") as ranks:
        answers = ranks.answers()
    wrong = [f"rank {rank}: {what}" for rank, answer in enumerate(answers) for what in answer["wrong"]]
    if any(answer["elsewhere"] for answer in answers):
        context.note("they are called in the engine's own threads")
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
    threads: set[int] = set()
    passes = 4
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(rank.device))
        first: Any = next(model.parameters())
        last: Any = list(model.parameters())[-1]
        for number in range(passes):
            order: list[str] = []
            seen: dict[str, Any] = {}

            def look(name: str, order: list[str] = order) -> None:
                order.append(name)
                threads.add(threading.get_ident())
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
            after = first.grad.clone(), last.grad.clone()
            for name, now in zip(("first", "last"), after, strict=True):
                if not torch.equal(seen[name], now):
                    wrong.append(f"pass {number}: the {name} gradient was not summed yet")
                both = [torch.empty_like(now) for _ in range(2)]
                dist.all_gather(both, now)
                if not torch.equal(both[0], both[1]):
                    wrong.append(f"pass {number}: the {name} gradient is not that of the other rank")
    rank.meet("over")
    _KEPT.append(model)
    return {"wrong": wrong, "passes": passes, "elsewhere": len(threads - {threading.get_ident()})}


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
    """`rackrun.checkpoint.host_memory.device_threads.use_device` gives each thread its own mode of capture; without it such a question ends the other's capture."""
    import torch

    from rackrun.checkpoint.host_memory.device_threads import use_device

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


@check(
    "C13",
    "a rank comes 25 s late to its first sum, gather and send",
    expected="nothing breaks; right values",
    limit_s=75,
    beside=True,
)
def late_to_the_first(context: Context) -> Found:
    """The first call of a kind connects a rank to its peers, and in non-blocking mode torch limits that: a peer that compiles or saves is no lost one."""
    late_s = context.pick(25.0, 1.0)
    with Ranks(context, "relied_on:comes_late", 2, {"late_s": late_s}) as ranks:
        ranks.answers()
    return Found(late_s, "s late")


def comes_late(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("late")
    rank.meet("built")
    if rank.rank == 1:
        time.sleep(rank.given["late_s"])
    total = torch.full((8,), float(rank.rank + 1), device=rank.device)
    communicator.call("allreduce", [total], seams.asynchronous()).wait()
    gathered = torch.zeros(16, device=rank.device)
    communicator.call("_allgather_base", gathered, total + rank.rank, seams.gathering()).wait()
    passed = torch.full((8,), 7.0 if rank.rank == 0 else 0.0, device=rank.device)
    communicator.call("send" if rank.rank == 0 else "recv", [passed], 1 - rank.rank, 0).wait()
    found = [float((one + 0)[-1].item()) for one in (total, gathered, passed)]
    if found != [3.0, 4.0, 7.0]:
        raise AssertionError(f"sum, gather and send gave {found}, not [3, 4, 7]")
    rank.meet("over")
    return {}


@check(
    "C14",
    "a rank is broken in the middle of a sum: what its peer is left with",
    expected="right sums, or the loss is seen",
    limit_s=75,
)
def peer_of_a_broken_rank(context: Context) -> Found:
    """A kernel that leaves goes on counting up the steps that its peer waits for, so the peer's ends well, with garbage. The peer can see that the
    connections between the hosts are closed (`lost_a_peer`), which a break does first."""
    rounds = context.pick(6, 4)
    with Ranks(context, "relied_on:breaks_amid_sums", 2, {"rounds": rounds}, double="early") as ranks:
        ranks.answer(0)
        told = ranks.answer(1)
    context.note(
        f"{told['right']} right, {told['garbage']} ended with garbage, {told['held']} did not end by themselves"
    )
    if told["unseen"]:
        return failed(f"{told['unseen']} of {rounds} sums ended with garbage, and no loss was to be seen")
    return Found(rounds, "rounds")


def breaks_amid_sums(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    told = {"right": 0, "garbage": 0, "held": 0, "unseen": 0}
    for number in range(rank.given["rounds"]):
        communicator = rank.communicator(f"round-{number}")
        tensor = torch.full((2**26 if rank.device.type == "cuda" else 2**16,), 1.0, device=rank.device)
        rank.meet(f"ready-{number}")
        work = communicator.call("allreduce", [tensor], seams.asynchronous())
        if rank.rank == 0:
            time.sleep(0.002 * number)  # in the sum, before it, or after it
            communicator.break_()
        else:
            work.wait()
            ended = seams.quiet_after(rank.device, 1.0) is not None
            seen = communicator.lost_a_peer()
            if ended:
                right = bool((seams.as_they_are(tensor) == 2.0).all())
                told["right" if right else "garbage"] += 1
                told["unseen"] += not right and not seen
            else:
                told["held"] += 1
            communicator.break_()
        communicator.drop()
        rank.meet(f"over-{number}")
    return told
