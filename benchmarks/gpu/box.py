"""H: eight GPUs of one box, with NVLink between them: the same promises, at the times that count."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from benchmarks.gpu.jobs import compare, train
from benchmarks.gpu.overhead import in_turns, ratio_of, slow_rank_named
from benchmarks.gpu.ranks import Rank, Ranks
from benchmarks.gpu.registry import Context, Found, Skip, check, failed
from benchmarks.gpu.shared import compared, strike, struck

__all__: list[str] = []

_BOX = "eight GPUs, and the times of their kernels"
GIB, MIB = 2**30, 2**20


def _gpus(context: Context) -> int:
    import torch

    return 3 if context.dry else min(torch.cuda.device_count(), 8)


def _idle(rank: Rank) -> None:
    from benchmarks.gpu import seams

    seams.quiet_after(rank.device, 60)


@check("H1", "build and break, all ranks, NVLS off and on", expected="p50 <= 0.8 s, no failure", limit_s=150)
def cycles(context: Context) -> Found:
    p50 = {}
    for nvls in ("0", "1"):
        inner = context.within(f"nvls-{nvls}")
        given = {"count": context.pick(50, 3), "seconds": 55}
        with Ranks(inner, "nccl:cycling", _gpus(context), given, env={"NCCL_NVLS_ENABLE": nvls}) as ranks:
            try:
                told = ranks.answer(0)
            except RuntimeError as error:
                if nvls == "0":
                    raise
                context.note(f"with NVLS it fails: {str(error)[:300]}")
                continue
        p50[nvls] = statistics.median(told["took_s"][1:])
        context.note(
            f"NVLS {nvls}: {len(told['took_s'])} cycles, first {told['took_s'][0]:.2f} s, p50 {p50[nvls]:.2f} s"
        )
    return Found(p50["0"], "s", ok=context.dry or p50["0"] <= 0.8)


@check(
    "H2",
    "SIGKILL in a sum, CUMEM on and off: survivors",
    expected="0 die with CUMEM; a count without",
    limit_s=150,
)
def survivors(context: Context) -> Found:
    dead = {"1": 0, "0": 0}
    size, quiet = _gpus(context), []
    for cumem, rounds in (("1", context.pick(6, 1)), ("0", context.pick(3, 1))):
        for number in range(rounds):
            if time.monotonic() > context.deadline - 20:
                context.note(f"CUMEM {cumem}: {number} rounds only")
                break
            inner = context.within(f"{cumem}-{number}")
            given = {"size": context.pick(64, 1) * MIB}
            with Ranks(inner, "shared:streams", size, given, env={"NCCL_CUMEM_ENABLE": cumem}) as ranks:
                for rank in range(size):
                    ranks.wait_for(f"going-{rank}")
                ranks.kill(size - 1)
                ranks.say("lost")
                for rank in range(size - 1):
                    try:
                        told = ranks.answer(rank)
                        quiet.append(told["quiet_s"] if told["quiet_s"] is not None else 99.0)
                    except RuntimeError as error:
                        dead[cumem] += 1
                        context.note(str(error)[:150])
    (context.shared / "H2.txt").write_text(repr(quiet))
    context.note(
        f"CUMEM off: {dead['0']} died; break to quiet, s: p50 {statistics.median(quiet or [99]):.3f}, max {max(quiet, default=99):.3f}"
    )
    return Found(dead["1"], "died", ok=dead["1"] == 0)


@check("H3", "break to quiet device, a peer killed", expected="<= 0.05 s with revoke, <= 0.5 s", limit_s=60)
def quiet(context: Context) -> Found:
    size = _gpus(context)
    with Ranks(context, "shared:streams", size, {"size": context.pick(64, 1) * MIB}) as ranks:
        for rank in range(size):
            ranks.wait_for(f"going-{rank}")
        ranks.kill(size - 1)
        ranks.say("lost")
        answers = [ranks.answer(rank) for rank in range(size - 1)]
    times = [one["quiet_s"] for one in answers]
    if any(one is None for one in times):
        return failed("a device was not quiet 10 s after the break")
    return Found(max(times), "s", ok=context.dry or max(times) <= 0.5)


def _fast(context: Context, env: dict[str, str], name: str) -> list[str]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        ranks = _gpus(context) - 1
        more = ("--reduction", "fast", "--batch", str(4 * ranks))
        undisturbed = train(context, f"{name}-undisturbed", wrap="ddp", steps=30, ranks=ranks, more=more)
        lines = train(
            context,
            f"{name}-struck",
            wrap="ddp",
            steps=30,
            ranks=ranks,
            spares=1,
            strikes=[strike(1, 10, "forward")],
            more=more,
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
    return compare(undisturbed, lines, ranks)


@check(
    "H4",
    "reduction fast, before and after a swap to another GPU",
    expected="recorded; equal with Ring and Simple",
    limit_s=150,
    must=False,
    not_dry=_BOX,
)
def fast_bits(context: Context) -> Found:
    default = _fast(context, {}, "default")
    ring = _fast(context, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, "ring")
    context.note(f"NCCL's own choice: {'equal' if not default else f'{len(default)} differences'}")
    return failed(f"with Ring and Simple {len(ring)} differences: {ring[0]}") if ring else Found("equal")


@check(
    "H5",
    "a swap from end to end, seven and one: DDP, FSDP2; six and one: TP in pairs",
    expected="bit-equal; <= 2 s, must 3",
    limit_s=200,
)
def swaps(context: Context) -> Found:
    gpus, took = _gpus(context), []
    width = ("--width", str(context.pick(1024, 64)))
    for wrap in ("ddp", "fsdp", "tp"):
        ranks = gpus - 1 if wrap != "tp" else context.pick((gpus - 1) // 2 * 2, 4)
        more = ("--batch", str(4 * ranks), *width)
        inner = context.within(wrap)
        found = struck(inner, wrap, context.pick(40, 14), [strike(1, 5, "backward")], more=more, ranks=ranks, double="")
        if not found.ok or not isinstance(found.value, float):
            return failed(f"{wrap}: {found.note}")
        context.note(f"{wrap} {found.value:.2f} s")
        took.append(found.value)
    return Found(max(took), "s", ok=context.dry or max(took) <= 3.0)


@check(
    "H6",
    "a communicator for who goes on: new; shrunk; of world and spare, shrunk and split by key",
    expected="a table of seconds; ranks in the order of keys",
    limit_s=110,
    must=False,
    not_dry=_BOX,
)
def remade(context: Context) -> Found:
    """A communicator of the world and its spare is made while all is well. When rank 1 is lost, the others shrink it and split what is left, with their
    logical ranks as keys: then the spare has the number of who was lost, which neither shrinking nor growing gives it."""
    size = _gpus(context)
    with Ranks(context, "box:remakes", size, {"rounds": 3}) as ranks:
        for rank in range(size):
            ranks.wait_for(f"idle-{rank}")
        ranks.kill(_LOST)
        ranks.say("lost")
        answers = [ranks.answer(rank) for rank in range(size) if rank != _LOST]
    if lacks := answers[0]["lacks"]:
        raise Skip(f"the NCCL that torch has loaded lacks {', '.join(lacks)}")
    if wrong := [what for answer in answers for what in answer["wrong"]]:
        return failed("; ".join(wrong[:3]))
    table = {name: max(answer["took_s"][name] for answer in answers) for name in answers[0]["took_s"]}
    context.note("s until the first result: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in table.items()))
    return Found(table["shrink and split, rank killed"], "s")


_LOST = 1


def remakes(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    torch.cuda.set_device(rank.device)
    torch.zeros(1, device=rank.device)
    nccl, last = seams.raw_nccl(), rank.size - 1
    lacks = nccl.lacks("ncclCommShrink", "ncclCommSplit")
    key = _LOST if rank.rank == last else rank.rank
    survivors = [one for one in range(rank.size) if one != _LOST]
    took: dict[str, list[float]] = {}
    wrong: list[str] = []

    def first_result(communicator: Any, wanted: list[int], name: str) -> None:
        """Who has which place: the keys of all, in the order of ranks."""
        mine = torch.tensor([key if rank.rank != _LOST else -1], dtype=torch.int32, device=rank.device)
        all_ = torch.empty(len(wanted), dtype=torch.int32, device=rank.device)
        communicator.gather(mine.data_ptr(), all_.data_ptr(), 1, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        if all_.tolist() != wanted:
            wrong.append(f"{name}: the order is {all_.tolist()}, not {wanted}")

    def timed(name: str, make: Any, wanted: list[int]) -> Any:
        rank.meet(f"begins-{name}-{len(took.get(name, []))}", survivors)
        began = time.monotonic()
        made = make()
        first_result(made, wanted, name)
        took.setdefault(name, []).append(time.monotonic() - began)
        return made

    if not lacks:
        if rank.rank == 0:
            rank.say_bytes("id", nccl.unique_id())
        whole = nccl.connect(rank.wait_for_bytes("id"), rank.size, rank.rank)
        first_result(whole, [*range(_LOST), -1, *range(_LOST + 1, last), _LOST], "the whole")
    in_order, by_key = [*(one for one in range(last) if one != _LOST), _LOST], list(range(last))

    def shrink_and_split(name: str) -> None:
        made: list[Any] = []

        def make() -> Any:
            made.append(whole.without([_LOST]))
            return made[0].ordered(key)

        for one in (timed(name, make, by_key), *made):
            one.drop()

    if not lacks and rank.rank != _LOST:
        for number in range(rank.given["rounds"]):
            if rank.rank == 0:
                rank.say_bytes(f"id-{number}", nccl.unique_id())
            of_round = rank.wait_for_bytes(f"id-{number}")
            timed("new", lambda of_round=of_round: nccl.connect(of_round, last, key), by_key).drop()
            timed("shrink", lambda: whole.without([_LOST]), in_order).drop()
            shrink_and_split("shrink and split")
    rank.say(f"idle-{rank.rank}")
    rank.wait_for("lost")
    if not lacks:
        shrink_and_split("shrink and split, rank killed")
    return {"lacks": lacks, "wrong": wrong, "took_s": {name: statistics.median(times) for name, times in took.items()}}


@check("H7", "state from one rank to another over NCCL", expected=">= 200 GB/s", limit_s=60, must=False)
def peer_restore(context: Context) -> Found:
    size = context.pick(4 * GIB, 4 * MIB)
    with Ranks(context, "box:sends", 2, {"size": size}) as ranks:
        answers = ranks.answers()
    rate = size / answers[1]["seconds"] / 1e9
    return Found(rate, "GB/s", ok=answers[1]["same"] and (context.dry or rate >= 200))


def sends(rank: Rank) -> dict[str, Any]:
    import torch

    communicator = rank.communicator("sends")
    tensor = torch.full((rank.given["size"] // 8,), rank.rank, dtype=torch.int64, device=rank.device)
    times = []
    for _ in range(4):
        _idle(rank)
        began = time.monotonic()
        name = "send" if rank.rank == 0 else "recv"
        communicator.call(name, [tensor], 1 - rank.rank, 0).wait()
        _idle(rank)
        times.append(time.monotonic() - began)
    return {"seconds": statistics.median(times[1:]), "same": bool((tensor == 0).all().item())}


@check(
    "H8",
    "a sum of one number over all ranks: by the device, by the hosts",
    expected="<= 60 us; <= 200 us",
    limit_s=60,
    must=False,
)
def gate(context: Context) -> Found:
    with Ranks(context, "box:gates", _gpus(context)) as ranks:
        told = ranks.answers()[0]
    context.note(
        f"hosts p50 {told['host_us'][0]:.0f} us, p99 {told['host_us'][1]:.0f}; device p99 {told['device_us'][1]:.0f}"
    )
    return Found(
        told["device_us"][0], "us", ok=context.dry or (told["device_us"][0] <= 60 and told["host_us"][0] <= 200)
    )


def gates(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator, found = rank.communicator("gates"), {}
    for name, device in (("device_us", rank.device), ("host_us", torch.device("cpu"))):
        value, times = torch.ones(1, device=device), []
        for _ in range(400):
            began = time.perf_counter()
            communicator.call("allreduce", [value], seams.asynchronous(), on_host=name == "host_us").wait()
            _idle(rank)
            times.append(1e6 * (time.perf_counter() - began))
        times = sorted(times[50:])
        found[name] = [statistics.median(times), times[int(0.99 * len(times))]]
    return found


@check(
    "H9",
    "a pipeline of four by 1F1B: a stage in the middle killed",
    expected="bit-equal; 0 samples lost or twice",
    limit_s=120,
)
def pipeline(context: Context) -> Found:
    stages, steps = 4, context.pick(40, 10)
    undisturbed, lines = (
        train(
            context,
            name,
            script="pipeline.py",
            steps=steps,
            ranks=stages,
            spares=len(strikes),
            strikes=strikes,
            double="",
        )
        for name, strikes in (("undisturbed", []), ("struck", [strike(2, steps // 3, "backward")]))
    )
    return compared(context, undisturbed, lines, stages, strikes=1)


@check(
    "H10",
    "a GPU that is a tenth slower is named",
    expected="that rank, and no other",
    limit_s=110,
    must=False,
    not_dry=_BOX,
)
def slow_gpu(context: Context) -> Found:
    ranks = _gpus(context)
    size = ["--width", "2048", "--layers", "8", "--batch", str(4 * ranks)]
    return slow_rank_named(context, ["--steps", "400", "--sleep-ms", "5", *size], ranks=ranks, slow=2)


@check("H11", "all-reduce of 1 GiB, NVLS off and on", expected="a figure", limit_s=110, must=False)
def rates(context: Context) -> Found:
    rate = {}
    for nvls in ("0", "1"):
        inner = context.within(f"nvls-{nvls}")
        with Ranks(
            inner, "box:bandwidth", _gpus(context), {"size": context.pick(GIB, MIB)}, env={"NCCL_NVLS_ENABLE": nvls}
        ) as ranks:
            told = ranks.answers()
        rate[nvls] = statistics.median(one["gb_s"] for one in told)
    context.note(f"with NVLS {rate['1']:.0f} GB/s")
    return Found(rate["0"], "GB/s")


def bandwidth(rank: Rank) -> dict[str, Any]:
    import torch

    from benchmarks.gpu import seams

    communicator = rank.communicator("bandwidth")
    tensor, times = torch.ones(rank.given["size"] // 4, device=rank.device), []
    for _ in range(8):
        _idle(rank)
        began = time.monotonic()
        communicator.call("allreduce", [tensor], seams.asynchronous()).wait()
        _idle(rank)
        times.append(time.monotonic() - began)
    moved = 2 * rank.given["size"] * (rank.size - 1) / rank.size
    return {"gb_s": moved / statistics.median(times[2:]) / 1e9}


@check("H12", "a step with the exact reduction over one with the fast", expected="<= 1.6", limit_s=150, must=False)
def exact_over_fast(context: Context) -> Found:
    """Two jobs on the same GPUs, block by block in turns."""
    lines = in_turns(context, {"fast": (), "exact": ("--reduction", "exact")}, ranks=_gpus(context))
    ratio, note = ratio_of(lines, "exact", "fast")
    return Found(ratio, "", note, ok=context.dry or ratio <= 1.6)
