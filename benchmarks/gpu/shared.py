"""D: several ranks on one GPU. NCCL takes them for ranks of other hosts (``NCCL_HOSTID``), so the whole of the product's path runs, over sockets and
in time slices: what is judged is correctness, and bounds of seconds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import memory
from benchmarks.gpu.jobs import Job, compare, recoveries, train
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, Skip, check, failed

__all__ = ["compared", "reference", "strike", "struck"]

_GPU_ONLY = "only a GPU's own kernels, memory and driver can show it"
MIB = 2**20
Lines = list[dict[str, Any]]


# -- between two processes ---------------------------------------------------------------------------------------------
@check("D0", "NCCL between ranks that share a GPU", expected="right sums; small p50 <= 200 ms; NET/Socket", limit_s=60)
def shared_gpu(context: Context) -> Found:
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(context.folder / "nccl.%h.%p")}
    with Ranks(context, "shared:sums", 2, {"rounds": 20, "large": context.pick(64, 1) * MIB}, env=debug) as ranks:
        answers = ranks.answers()
    wrong = sum(one["wrong"] for one in answers)
    p50_ms = 1e3 * statistics.median(answers[0]["small_s"])
    large_ms = 1e3 * statistics.median(answers[0]["large_s"])
    logs = "".join(path.read_text(errors="replace") for path in context.folder.glob("nccl.*"))
    by_socket = "NET/Socket" in logs
    if not context.dry:
        context.note("NET/Socket" if by_socket else "NCCL does not say NET/Socket: see how it connects ranks here")
    context.note(f"64 MiB {large_ms:.1f} ms" if not context.dry else f"1 MiB {large_ms:.1f} ms")
    works = not wrong and (context.dry or p50_ms <= 200)
    (context.shared / "D0.json").write_text(json.dumps({"works": works}))
    return Found(p50_ms, "ms", f"{wrong} wrong sums" if wrong else "", ok=works)


def sums(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("sums")
    took: dict[str, list[float]] = {"small_s": [], "large_s": []}
    wrong = 0
    for what, size in (("small_s", 4096), ("large_s", rank.given["large"])):
        for turn in range(rank.given["rounds"]):
            tensor = torch.full((size // 4,), float(rank.rank + turn), device=rank.device)
            began = time.monotonic()
            work = communicator.call("allreduce", [tensor], seams.asynchronous())
            work.wait()
            seams.quiet_after(rank.device, 30)
            took[what].append(time.monotonic() - began)
            wanted = float(sum(range(rank.size)) + rank.size * turn)
            wrong += not bool((tensor == wanted).all().item())
    return {**took, "wrong": wrong}


def _needs_shared_gpu(context: Context) -> None:
    told = context.shared / "D0.json"
    if context.mode == "one" and told.exists() and not json.loads(told.read_text())["works"]:
        raise Skip("D0 has failed: ranks cannot share this GPU")


def _lost(context: Context, number: signal.Signals) -> Found:
    """Rank 1 goes in the middle of a stream of sums, rank 0 breaks: how long its device takes to be quiet."""
    _needs_shared_gpu(context)
    bound_s, size = 0.5, context.pick(16, 1) * MIB
    with Ranks(context, "shared:streams", 2, {"size": size}, double="stuck") as ranks:
        ranks.wait_for("going-0")
        ranks.wait_for("going-1")
        ranks.kill(1, number)
        ranks.say("lost")
        told = ranks.answer(0)
    quiet_s = told["quiet_s"]
    if quiet_s is None:
        return failed("the device was not quiet 10 s after the break")
    context.note(f"{told['enqueued']} sums were enqueued; break_() took {told['break_s']:.3f} s")
    return Found(quiet_s, "s", ok=context.dry or quiet_s <= bound_s)


def streams(rank: Rank) -> dict[str, Any]:
    """Sums until the mark ``lost`` is there; then a break, from another thread as in a worker."""
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("streams")
    broke: dict[str, float] = {}

    def breaks() -> None:
        rank.wait_for("lost")
        broke["at"] = time.monotonic()
        communicator.break_()
        broke["took"] = time.monotonic() - broke["at"]

    thread = threading.Thread(target=breaks, daemon=True)
    thread.start()
    enqueued, tensor = 0, torch.ones(rank.given["size"] // 4, device=rank.device)
    while "at" not in broke:
        try:
            communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        except RuntimeError:
            break  # the peer is gone, and this transport says so
        enqueued += 1
        if enqueued == 3:
            rank.say(f"going-{rank.rank}")
        if enqueued % 8 == 0:
            seams.quiet_after(rank.device, 60, stop=lambda: "at" in broke)
    thread.join(30)
    quiet_s = seams.quiet_after(rank.device, 10)
    if quiet_s is not None and "at" in broke:
        quiet_s = time.monotonic() - broke["at"]
    communicator.drop()
    return {"quiet_s": quiet_s, "enqueued": enqueued, "break_s": broke.get("took", -1.0)}


@check("D1", "SIGKILL of a peer in a sum: break to quiet device", expected="<= 0.5 s", limit_s=45)
def peer_killed(context: Context) -> Found:
    return _lost(context, signal.SIGKILL)


@check(
    "D2",
    "SIGSTOP of a peer in a sum: break to quiet device",
    expected="<= 0.5 s",
    limit_s=45,
    not_dry="D1 goes the same way",
)
def peer_stopped(context: Context) -> Found:
    return _lost(context, signal.SIGSTOP)


@check(
    "D3", "a rank never comes to the build; the next build", expected="<= 5 s, beside the one that is left", limit_s=60
)
def build_left(context: Context) -> Found:
    _needs_shared_gpu(context)
    with Ranks(context, "shared:builds", 3) as ranks:
        answers = [ranks.answer(0), ranks.answer(1)]
    took_s = max(one["second_s"] for one in answers)
    if any(one["first_over"] for one in answers):
        return failed("the build that waits for a rank which never comes has ended, before anybody left it")
    if any(one["sum"] != 2.0 for one in answers):
        return failed(f"the sum over the second group is {answers[0]['sum']}, not 2")
    return Found(took_s, "s", ok=context.dry or took_s <= 5.0)


def builds(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    if rank.rank == 2:
        return {}  # it never comes
    first: dict[str, bool] = {}

    def build() -> None:
        with contextlib.suppress(RuntimeError):
            rank.communicator("first")
        first["over"] = True

    threading.Thread(target=build, daemon=True).start()
    time.sleep(1.0)  # the first build is in the middle of its handshake
    over = bool(first)
    began = time.monotonic()
    communicator = rank.communicator("second", size=2)
    second_s = time.monotonic() - began
    tensor = torch.ones(4, device=rank.device)
    communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
    seams.quiet_after(rank.device, 20)
    return {"second_s": second_s, "first_over": over, "sum": float((tensor + 0)[0].item())}


@check(
    "D12",
    "a rank is killed in the middle of NCCL's build; the next build",
    expected="<= 5 s, beside the one that is left",
    limit_s=60,
    not_dry="only NCCL's own build waits like this",
)
def killed_in_build(context: Context) -> Found:
    """A build cannot be ended from outside, and one that waits for who has not connected yet does not end: it is left."""
    _needs_shared_gpu(context)
    answers = []
    with contextlib.ExitStack() as stack:
        tries = [
            stack.enter_context(
                Ranks(context.within(f"{after_ms}"), "shared:goes_amid_build", 3, {"after_s": after_ms / 1e3})
            )
            for after_ms in (5, 150, 400)
        ]
        for ranks in tries:
            answers += [ranks.answer(0), ranks.answer(1)]
    second_s = max(one["second_s"] for one in answers)
    ended = sum(one["over"] for one in answers)
    context.note(f"{ended} of {len(answers)} builds had ended by themselves when the next were there")
    if any(one["sum"] != 2.0 for one in answers):
        return failed("a sum over the second group is not 2")
    return Found(second_s, "s", ok=second_s <= 5.0)


def goes_amid_build(rank: Rank) -> dict[str, Any]:
    import os

    import torch

    from benchmarks.gpu import seams

    torch.zeros(1, device=rank.device)
    begun = threading.Event()
    over: list[bool] = []

    def builds_now() -> None:
        begun.set()
        if rank.rank == 2:
            threading.Timer(rank.given["after_s"], os.kill, [os.getpid(), signal.SIGKILL]).start()

    def build() -> None:
        with contextlib.suppress(RuntimeError):
            rank.communicator("first").break_()
        over.append(True)

    seams.when_nccl_builds(builds_now)
    rank.meet("here")
    threading.Thread(target=build, daemon=True).start()
    begun.wait(20)
    time.sleep(rank.given["after_s"] + 0.1)  # rank 2 does not come out of it
    began = time.monotonic()
    communicator = rank.communicator("second", size=2)
    second_s = time.monotonic() - began
    tensor = torch.ones(4, device=rank.device)
    communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
    seams.quiet_after(rank.device, 20)
    return {"second_s": second_s, "over": bool(over), "sum": float(seams.as_they_are(tensor)[0].item())}


@check("D4", "a peer is gone and nobody breaks: the next call", expected="<= 1 s, or it raises", limit_s=45)
def call_after_loss(context: Context) -> Found:
    _needs_shared_gpu(context)
    with Ranks(context, "shared:goes_on", 2, double="stuck") as ranks:
        ranks.wait_for("going-1")
        ranks.kill(1)
        ranks.say("lost")
        told = ranks.answer(0)
    return Found(told["slowest_s"], "s", told["raised"], ok=told["slowest_s"] <= 1.0)


def goes_on(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("goes-on")
    tensors = [torch.ones(MIB, device=rank.device) for _ in range(50)]
    communicator.call("allreduce", [tensors.pop()], seams.asynchronous()).wait()
    seams.quiet_after(rank.device, 20)
    rank.say(f"going-{rank.rank}")
    rank.wait_for("lost")
    slowest, raised, began = 0.0, "", time.monotonic()
    while time.monotonic() - began < 4.0 and not raised and tensors:
        called = time.monotonic()
        try:
            communicator.call("allreduce", [tensors.pop()], seams.asynchronous())
        except RuntimeError as error:
            raised = f"raises {type(error).__name__}"
        slowest = max(slowest, time.monotonic() - called)
        time.sleep(0.1)
    communicator.break_()
    return {"slowest_s": slowest, "raised": raised}


@check("D5", "breaks at random moments of a stream of calls", expected="no crash, no hang; p99 <= 0.5 s", limit_s=75)
def random_breaks(context: Context) -> Found:
    _needs_shared_gpu(context)
    given = {"rounds": context.pick(200, 6), "seconds": context.pick(12, 20), "size": context.pick(4 * MIB, 65536)}
    with Ranks(context, "shared:breaks", 2, given) as ranks:
        answers = ranks.answers()
    quiet = sorted(one for answer in answers for one in answer["quiet_s"])
    if not quiet or any(one < 0 for one in quiet):
        return failed(f"the device was not quiet after {sum(one < 0 for one in quiet)} of {len(quiet)} breaks")
    p99 = quiet[min(len(quiet) - 1, int(0.99 * len(quiet)))]
    context.note(f"{len(quiet) // 2} breaks; building took {answers[0]['build_s']:.2f} s at the median")
    return Found(p99, "s", ok=context.dry or p99 <= 0.5)


def breaks(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    draws, quiet, built = random.Random(rank.rank), [], []
    ends = time.monotonic() + rank.given["seconds"]
    for number in range(rank.given["rounds"]):
        if rank.rank == 0 and time.monotonic() > ends:
            rank.say(f"enough-{number}")
        began = time.monotonic()
        rank.meet(f"here-{number}")
        if rank.said(f"enough-{number}"):
            break
        communicator = rank.communicator(f"round-{number}")
        built.append(time.monotonic() - began)
        tensor = torch.ones(rank.given["size"] // 4, device=rank.device)
        at: dict[str, float] = {}

        def break_(communicator: Any = communicator, at: dict[str, float] = at) -> None:
            at["s"] = time.monotonic()
            communicator.break_()

        timer = threading.Timer(draws.uniform(0.0, 0.05), break_)
        timer.start()
        calls = 0
        while "s" not in at or calls < 1:
            calls += 1
            try:
                communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
            except RuntimeError:
                break
            if calls % 16 == 0:
                seams.quiet_after(rank.device, 5, stop=lambda at=at: "s" in at)  # type: ignore[misc]
        timer.join()
        quiet.append(-1.0 if seams.quiet_after(rank.device, 5) is None else time.monotonic() - at["s"])
        communicator.drop()
    return {"quiet_s": quiet, "build_s": statistics.median(built) if built else 0.0}


@check(
    "D6",
    "batched sends and receives: a ring, and two that both send first",
    expected="<= 2 s, right values",
    limit_s=60,
    beside=True,
)
def batched(context: Context) -> Found:
    _needs_shared_gpu(context)
    size = str(context.pick(64, 1) * MIB)
    with Job(
        context, "job", "contract.py", ["--cases", "ring,both_send_first", "--size", size], ranks=3, double=""
    ) as job:
        lines = job.finish()
    found = {(one["case"], one["rank"]): one for one in lines if one["what"] == "case"}
    wrong = [f"{case} on rank {rank}: {one['says']}" for (case, rank), one in found.items() if one["says"] != "ok"]
    missing = [case for case in ("ring", "both_send_first") for rank in range(3) if (case, rank) not in found]
    if wrong or missing:
        return failed("; ".join([*wrong, *(f"{case} has no answer" for case in missing)]))
    slowest = max(one["seconds"] for one in found.values())
    return Found(slowest, "s", ok=context.dry or slowest <= 2.0)


# -- whole jobs --------------------------------------------------------------------------------------------------------
def reference(
    context: Context, wrap: str, steps: int, more: tuple[str, ...] = (), ranks: int = 3, double: str = "late"
) -> Lines:
    """A run that nobody disturbs; kept for the checks that come after, or are at work beside this one."""
    kept = Path(context.shared) / f"reference-{wrap}-{steps}-{ranks}{''.join(more)}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            told: Lines = json.loads(kept.read_text())
            return told
        lines = train(context, "undisturbed", wrap=wrap, steps=steps, more=more, ranks=ranks, double=double)
        kept.write_text(json.dumps(lines))
        return lines


def struck(
    context: Context,
    wrap: str,
    steps: int,
    strikes: list[dict[str, Any]],
    *,
    more: tuple[str, ...] = (),
    double: str = "late",
    ranks: int = 3,
) -> Found:
    """The same training with and without strikes. One spare for each strike: none has to wait for a process to start."""
    _needs_shared_gpu(context)
    undisturbed = reference(context, wrap, steps, more, ranks, double)
    lines = train(
        context,
        "struck",
        wrap=wrap,
        steps=steps,
        strikes=strikes,
        spares=len(strikes),
        more=more,
        double=double,
        ranks=ranks,
    )
    return compared(context, undisturbed, lines, ranks, strikes=len(strikes))


def compared(context: Context, undisturbed: Lines, lines: Lines, ranks: int, *, strikes: int) -> Found:
    """``lines``, of a run that was struck: seconds of its slowest recovery, or what is not the same."""
    done = sum(line["what"] == "strike" for line in lines)
    if done != strikes:
        return failed(f"{done} of {strikes} strikes were done: the run proves nothing")
    generations = max((line.get("generation", 0) for line in lines if line["what"] == "end"), default=0)
    if generations > 1 + strikes:
        return failed(f"{generations} generations after {strikes} strikes: somebody was lost whom nobody struck")
    if different := compare(undisturbed, lines, ranks):
        return failed(f"{len(different)} differences: {'; '.join(different[:3])}")
    took = recoveries(lines)
    context.note("from strike to next step, s: " + " ".join(f"{one:.2f}" for one in took))
    return Found(max(took), "s") if took else failed("no step came after a strike")


def strike(rank: int, step: int, place: str, what: str = "kill", after: int | None = None) -> dict[str, Any]:
    return {"rank": rank, "step": step, "place": place, "what": what, "after": after}


@check(
    "D7", "a whole job, DDP: three ranks killed, one stopped", expected="bit-equal; <= 3 s and NCCL's init", limit_s=120
)
def ddp_job(context: Context) -> Found:
    draws = random.Random(7)
    places = ["begin", "forward", "backward", "update"]
    steps = context.pick(60, 24)
    strikes = [strike(1, steps // 6, draws.choice(places)), strike(0, steps // 2, draws.choice(places), "stop")]
    if not context.dry:
        strikes += [strike(2, 40, draws.choice(places)), strike(0, 50, draws.choice(places))]
    return struck(context, "ddp", steps, strikes)


@check(
    "D8",
    "plain backward, a sub-group, phases; lost behind kernels that run",
    expected="bit-equal; no garbage",
    limit_s=110,
    beside=True,
)
def late_kernels(context: Context) -> Found:
    steps, more = context.pick(24, 12), ("--sleep-ms", "40", "--phases", "2")
    strikes = [strike(1, steps // 4, "backward"), strike(2, 4, "phase", after=0)]
    if not context.dry:
        strikes += [strike(2, 12, "backward", "stop", after=1), strike(0, 18, "backward", after=2)]
    return struck(context, "plain", steps, strikes, more=more, double="stuck")


@check(
    "D9",
    "a whole job, FSDP2, snapshots each step: a rank killed",
    expected="bit-equal; 0 samples lost or twice",
    limit_s=110,
    beside=True,
)
def fsdp_job(context: Context) -> Found:
    steps = context.pick(30, 14)
    return struck(context, "fsdp", steps, [strike(1, steps // 3, "backward")])


@check(
    "D10",
    "device memory of a survivor over five swaps, most of it filled",
    expected="<= 64 MiB more",
    limit_s=110,
    not_dry=_GPU_ONLY,
)
def memory_kept(context: Context) -> Found:
    _needs_shared_gpu(context)
    swaps = 5
    used: dict[str, int | None] = {}
    strikes = [strike(1, 10 + 8 * number, "backward", after=number - 1 if number else None) for number in range(swaps)]

    def during(job: Job) -> None:
        pid = job.wait_for(lambda line: line["what"] == "done" and line["rank"] == 0 and line["step"] >= 6)["pid"]
        used["before"] = memory.of_process(pid)
        job.wait_for(lambda line: line["what"] == "done" and line["rank"] == 0 and line["step"] >= 10 + 8 * swaps)
        used["after"] = memory.of_process(pid)

    lines = train(
        context, "job", wrap="ddp", steps=400, strikes=strikes, spares=swaps, more=("--fill", "0.08"), during=during
    )
    if sum(line["what"] == "strike" for line in lines) != swaps:
        return failed("not all strikes were done: the run proves nothing")
    before, after = used.get("before"), used.get("after")
    if before is None or after is None:
        raise Skip("NVML does not tell the memory of single processes here")
    more = (after - before) / MIB
    return Found(more, "MiB", ok=more <= 64)


@check(
    "D11", "the newcomer is lost in its first step", expected="bit-equal; one more generation", limit_s=90, beside=True
)
def newcomer_lost(context: Context) -> Found:
    steps = context.pick(60, 24)
    return struck(context, "ddp", steps, [strike(1, steps // 4, "backward"), strike(1, 0, "forward", after=0)])


@check(
    "D13",
    "a source is killed while it gives its state to a newcomer",
    expected="bit-equal; one more generation",
    limit_s=90,
    beside=True,
)
def source_lost(context: Context) -> Found:
    """What a newcomer has received until then is no state, and nobody's bits are blamed for it."""
    steps = context.pick(60, 24)
    more = ("--width", str(context.pick(2048, 512)))
    return struck(context, "ddp", steps, [strike(1, steps // 4, "backward"), strike(0, 0, "give", after=0)], more=more)
