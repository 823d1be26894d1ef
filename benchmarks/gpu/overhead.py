"""E: what rackrun costs on one rank, beside the same training bare, in blocks that take turns; determinism; mixed precision and compiled models."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.jobs import Job, compare, train
from benchmarks.gpu.registry import Context, Found, check, failed
from benchmarks.gpu.shared import compared, reference, strike

__all__ = ["in_turns", "ratio_of", "slow_rank_named"]

_GPU_ONLY = "only a GPU's own queue can show it"
MIB = 2**20


KINDS: dict[str, tuple[str, ...]] = {
    "fast": ("--syncs",),
    "snapshots": ("--snapshot-every", "1"),
    "exact": ("--reduction", "exact"),
}
"""What is measured beside the bare training, each in a job of its own."""
BARE = "bare"
Lines = list[dict[str, Any]]


def in_turns(context: Context, kinds: Mapping[str, Sequence[str]], *, ranks: int = 1, bare: bool = False) -> Lines:
    """Lines of ``scripts/steps.py``: all kinds at once, block by block in turns, so that all see the same machine."""
    turns = [*((BARE,) if bare else ()), *kinds]
    at = context.folder / f"turns-{'-'.join(turns)}"
    at.mkdir()
    common = [*_size(context, ranks), "--turns", ",".join(turns), "--turns-at", str(at)]
    lines: Lines = []
    with contextlib.ExitStack() as stack:
        jobs = []
        for kind, more in kinds.items():
            name, arguments = f"{at.name}-{kind}", [*common, *more, "--kind", kind]
            jobs.append(stack.enter_context(Job(context, name, "steps.py", arguments, ranks=ranks, double="")))
        if bare:
            stack.enter_context(jobs[0].beside("--kind", BARE))
        for job in jobs:
            lines += job.finish(within_s=0.7 * context.limit_s)
    return lines


def _measured(context: Context, *kinds: str) -> Lines:
    """All kinds are measured together, by the check that asks first; where that fails, only ``kinds``."""
    kept = context.shared / "steps.json"
    if not kept.exists():
        kept.write_text("[]")
        together = {kind: KINDS[kind] for kind in context.pick(KINDS, ("fast",))}
        try:
            kept.write_text(json.dumps(in_turns(context.within("together"), together, bare=True)))
        except RuntimeError as error:
            context.note(f"all kinds together: {str(error)[:300]}")
    told: Lines = json.loads(kept.read_text())
    return told or in_turns(context, {kind: KINDS[kind] for kind in kinds}, bare=True)


def _size(context: Context, ranks: int) -> list[str]:
    """A GPT of 0.2 B parameters; where each GPU trains one of its own, of 1.2 B. Each job keeps two snapshots of its shard in the host's memory."""
    if context.dry:
        size = ["--layers", "2", "--width", "64", "--context", "32", "--block", "6", "--blocks", "3"]
    else:
        size = ["--layers", "24" if ranks > 1 else "4", "--width", "2048", "--blocks", "5", "--cold-blocks", "3"]
    batch = context.pick(24 if ranks == 1 else 4, 2)  # of one rank: a snapshot of it takes less time than a step
    return [*size, "--batch", str(ranks * batch), "--micro", str(batch)]


def _of(lines: Sequence[dict[str, Any]], kind: str, what: str) -> list[Any]:
    return [line[what] for line in lines if line["what"] == "block" and line["kind"] == kind and line["warm"]]


def ratio_of(lines: Lines, kind: str, other: str) -> tuple[float, str]:
    """Median step of ``kind`` over that of ``other``, and how much blocks of the other differ."""
    mine, theirs = _of(lines, kind, "step_s"), _of(lines, other, "step_s")
    median = statistics.median(theirs)
    noise = (max(theirs) - min(theirs)) / median
    note = f"{other} {1e3 * median:.1f} ms, its blocks differ by {100 * noise:.1f} %"
    return statistics.median(mine) / median, note


def _all(lines: Sequence[dict[str, Any]], kind: str) -> str:
    """Of all blocks, the cold ones in parentheses: ms a step."""
    told = [line for line in lines if line["what"] == "block" and line["kind"] == kind]
    return " ".join(f"{1e3 * line['step_s']:.1f}" if line["warm"] else f"({1e3 * line['step_s']:.1f})" for line in told)


def _taken(lines: Sequence[dict[str, Any]], kind: str, what: str) -> list[float]:
    """Of each warm step: ms, of what `scripts/steps.py` tells."""
    return [one for block in _of(lines, kind, "taken_ms") for one in block[what]]


def _parts(lines: Sequence[dict[str, Any]], kind: str) -> str:
    """What the host does in a step, in the order of ``steps.PARTS``, and how long the device is idle: ms."""
    told = next(block for block in _of(lines, kind, "taken_ms"))
    idle = [one for one in told if one.startswith("before")]
    parts = [one for one in told if one.startswith("to ")]
    host = " ".join(f"{statistics.median(_taken(lines, kind, part)):.2f}" for part in parts)
    return f"host {host}; " + ", ".join(f"idle {one} {statistics.median(_taken(lines, kind, one)):.2f}" for one in idle)


@check("E1", "step time under rackrun over bare", expected="<= 1.01", limit_s=180, must=False)
def step_time(context: Context) -> Found:
    lines = _measured(context, "fast")
    ratio, note = ratio_of(lines, "fast", BARE)
    for kind in ("fast", BARE):
        context.note(f"{kind}: blocks {_all(lines, kind)}; {_parts(lines, kind)}")
    return Found(ratio, "", note, ok=context.dry or ratio <= 1.01)


@check("E2", "idle device between backward and update", expected="<= 150 us more than bare", limit_s=180, must=False)
def bubble(context: Context) -> Found:
    lines = _measured(context, "fast")
    found = {kind: 1e3 * statistics.median(_taken(lines, kind, "before update")) for kind in ("fast", BARE)}
    more = found["fast"] - found[BARE]
    return Found(more, "us", f"bare {found[BARE]:.0f} us", ok=context.dry or more <= 150)


@check(
    "E3",
    "snapshots after each step: mean, and slowest step",
    expected="<= 1 % more",
    limit_s=180,
    must=False,
    not_dry="a figure of a GPU; E1 goes the same way",
)
def snapshots(context: Context) -> Found:
    lines = _measured(context, "fast", "snapshots")
    ratio, note = ratio_of(lines, "snapshots", "fast")
    slowest, median = max(_of(lines, "snapshots", "slowest_s")), statistics.median(_of(lines, "snapshots", "step_s"))
    context.note(
        f"slowest step {slowest / median:.2f} of the median; {note}; blocks {_all(lines, 'snapshots')}; {_parts(lines, 'snapshots')}"
    )
    more = 100 * (ratio - 1)
    return Found(more, "%", ok=more <= 1.0)


@check("E4", "memory of the device that snapshots take", expected="0", limit_s=180, not_dry=_GPU_ONLY)
def snapshot_memory(context: Context) -> Found:
    lines = _measured(context, "fast", "snapshots")
    without, with_ = (statistics.median(_of(lines, kind, "allocated")) for kind in ("fast", "snapshots"))
    more = (with_ - without) / MIB
    return Found(more, "MiB", ok=abs(more) < 1)


@check(
    "E5",
    "exact reduction over fast, one rank",
    expected="<= 3 % more",
    limit_s=180,
    must=False,
    not_dry="a figure of a GPU; E1 goes the same way, and D7 reduces exactly",
)
def exact(context: Context) -> Found:
    lines = _measured(context, "fast", "exact")
    ratio, note = ratio_of(lines, "exact", "fast")
    more = 100 * (ratio - 1)
    context.note(f"{note}; {_parts(lines, 'exact')}")
    return Found(more, "%", ok=more <= 3.0)


@check(
    "E6",
    "a rank whose device takes longer is named",
    expected="that rank, and no other",
    limit_s=90,
    must=False,
    not_dry="own time is of the device's events; on hosts it is benchmarks/slow_ranks.py",
)
def own_time(context: Context) -> Found:
    return slow_rank_named(context, ["--steps", "300", "--sleep-ms", "30"], ranks=3, slow=1)


def slow_rank_named(context: Context, arguments: Sequence[str], *, ranks: int, slow: int) -> Found:
    """A job in which rank ``slow``'s device sleeps ``--sleep-ms`` in each step."""
    arguments = ["--wrap", "ddp", *arguments, "--slow-rank", str(slow)]
    options = ["--slow-ranks", "notice", "--slow-after", "3"]
    with Job(context, "job", "train.py", arguments, ranks=ranks, options=options) as job:
        job.finish()
        said = job.said(20_000)
    told = [line for line in said.splitlines() if " is slow: " in line]
    if not told:
        return failed("nobody was called slow")
    others = [line for line in told if f"rank {slow}" not in line]
    return (
        failed(f"somebody else was called slow: {others[0]}") if others else Found(len(told), "notices", told[0][:160])
    )


@check(
    "E7",
    "waits for the device in rackrun's own frames, a step",
    expected="<= 1",
    limit_s=180,
    must=False,
    not_dry=_GPU_ONLY,
)
def syncs(context: Context) -> Found:
    lines = _measured(context, "fast")
    end = next(one for one in lines if one["what"] == "end" and one["kind"] == "fast")
    return Found(end["syncs"], "a step", ", ".join(end["places"][:8]), ok=end["syncs"] <= 1)


@check("E8", "the same training twice", expected="equal bits", limit_s=100, beside=True)
def twice(context: Context) -> Found:
    differ = []
    for wrap, steps in context.pick([("ddp", 60), ("fsdp", 30)], [("ddp", 24)]):  # D7 and D9 have done them once
        one = reference(context, wrap, steps)
        other = train(context, f"again-{wrap}", wrap=wrap, steps=steps, double="")
        differ += [f"{wrap}: {what}" for what in compare(one, other, 3)]
    if differ:
        return failed(f"{len(differ)} differences: {'; '.join(differ[:3])}")
    if not context.dry:
        import torch

        context.note(f"TF32 {torch.backends.cuda.matmul.allow_tf32}, cuDNN benchmark {torch.backends.cudnn.benchmark}")
    return Found("equal", note="once as NCCL and once as gloo" if context.dry else "DDP 60 steps, FSDP2 30")


@check(
    "E9",
    "a gradient scaler and mixed precision; layers in FP8: one swap of each",
    expected="bit-equal",
    limit_s=150,
    beside=True,
)
def scaler(context: Context) -> Found:
    steps, took = context.pick(40, 14), []
    for name in ("amp", "fp8"):
        if name == "fp8" and (why := _no_fp8(context)):
            context.note(why)
            continue
        inner, more = context.within(name), (f"--{name}",)
        undisturbed = train(inner, "undisturbed", wrap="ddp", steps=steps, more=more, double="")
        strikes = [strike(1, steps // 3, "backward")]
        lines = train(inner, "struck", wrap="ddp", steps=steps, strikes=strikes, spares=1, more=more)
        found = compared(context, undisturbed, lines, 3, strikes=1)
        if not found.ok or not isinstance(found.value, float):
            return failed(f"{name}: {found.note}")
        took.append(found.value)
    return Found(max(took), "s")


def _no_fp8(context: Context) -> str:
    """Why this device cannot multiply in 8 bits. "": it can."""
    import torch

    if context.dry or torch.cuda.get_device_capability(0) >= (8, 9):
        return ""
    return "FP8 was not tried: this GPU is older than it"


@check(
    "E10",
    "a compiled model in FSDP2, one swap",
    expected="runs; bit-equal",
    limit_s=120,
    must=False,
    not_dry="compiling for the host takes a minute; tests/worker has it",
    beside=True,
)
def compiled(context: Context) -> Found:
    steps = 20
    undisturbed = train(context, "undisturbed", wrap="fsdp", steps=steps, more=("--compile",))
    strikes = [{"rank": 1, "step": 8, "place": "backward", "what": "kill", "after": None}]
    lines = train(context, "struck", wrap="fsdp", steps=steps, strikes=strikes, spares=1, more=("--compile",))
    different = compare(undisturbed, lines, 3)
    breaks = max((line.get("graph_breaks", 0) for line in lines if line["what"] == "end"), default=0)
    note = f"{breaks} graph breaks"
    return (
        failed(f"{len(different)} differences: {different[0]}; {note}") if different else Found("bit-equal", note=note)
    )
