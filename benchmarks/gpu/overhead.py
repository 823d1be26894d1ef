"""E: what rackrun costs on one rank, beside the same training bare, in blocks that take turns; determinism; mixed precision and compiled models."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.jobs import Job, compare, recoveries, train
from benchmarks.gpu.registry import Context, Found, check, failed
from benchmarks.gpu.shared import reference

__all__: list[str] = []

_GPU_ONLY = "only a GPU's own queue can show it"
MIB = 2**20


def _measured(context: Context, name: str, *more: str) -> list[dict[str, Any]]:
    """Lines of ``scripts/steps.py``, kept for the checks that ask for the same."""
    kept = context.shared / f"steps-{name}.json"
    if kept.exists():
        told: list[dict[str, Any]] = json.loads(kept.read_text())
        return told
    arguments = [*_size(context), *more]
    with Job(context, f"steps-{name}", "steps.py", arguments, ranks=1, double="") as job, job.beside("--bare"):
        lines = job.finish()
    kept.write_text(json.dumps(lines))
    return lines


def _size(context: Context) -> list[str]:
    """A GPT of 1.2 B parameters where two of them with their optimizers have room, else of 0.6 B."""
    if context.dry:
        return ["--layers", "2", "--width", "64", "--context", "32", "--batch", "2", "--block", "6", "--blocks", "3"]
    import torch

    layers = 24 if torch.cuda.get_device_properties(0).total_memory > 100 * 2**30 else 10
    return ["--layers", str(layers), "--width", "2048", "--batch", "4", "--blocks", "4"]


def _of(lines: Sequence[dict[str, Any]], kind: str, what: str) -> list[Any]:
    return [line[what] for line in lines if line["what"] == "block" and line["kind"] == kind and line["warm"]]


def _ratio(lines: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """Median of elastic over median of bare, and how much blocks of one kind differ."""
    elastic, bare = _of(lines, "elastic", "step_s"), _of(lines, "bare", "step_s")
    ratio = statistics.median(elastic) / statistics.median(bare)
    noise = (max(bare) - min(bare)) / statistics.median(bare)
    return ratio, f"bare {1e3 * statistics.median(bare):.1f} ms, its blocks differ by {100 * noise:.1f} %"


@check("E1", "step time under rackrun over bare", expected="<= 1.01", limit_s=90, must=False)
def step_time(context: Context) -> Found:
    ratio, note = _ratio(_measured(context, "fast", "--syncs"))
    return Found(ratio, "", note, ok=context.dry or ratio <= 1.01)


@check("E2", "idle device between backward and update", expected="<= 150 us more than bare", limit_s=90, must=False)
def bubble(context: Context) -> Found:
    lines = _measured(context, "fast", "--syncs")
    found = {
        kind: 1e3 * statistics.median([one for block in _of(lines, kind, "bubble_ms") for one in block])
        for kind in ("elastic", "bare")
    }
    more = found["elastic"] - found["bare"]
    return Found(more, "us", f"bare {found['bare']:.0f} us", ok=context.dry or more <= 150)


@check("E3", "snapshots after each step: mean, and slowest step", expected="<= 1 % more", limit_s=100, must=False)
def snapshots(context: Context) -> Found:
    without, _ = _ratio(_measured(context, "fast", "--syncs"))
    lines = _measured(context, "snapshots", "--snapshot-every", "1")
    ratio, note = _ratio(lines)
    slowest, median = max(_of(lines, "elastic", "slowest_s")), statistics.median(_of(lines, "elastic", "step_s"))
    context.note(f"slowest step {slowest / median:.2f} of the median; {note}")
    more = 100 * (ratio / without - 1)
    return Found(more, "%", ok=context.dry or more <= 1.0)


@check("E4", "memory of the device that snapshots take", expected="0", limit_s=100, not_dry=_GPU_ONLY)
def snapshot_memory(context: Context) -> Found:
    allocated = [
        statistics.median(_of(_measured(context, name, *more), "elastic", "allocated"))
        for name, more in (("fast", ["--syncs"]), ("snapshots", ["--snapshot-every", "1"]))
    ]
    more = (allocated[1] - allocated[0]) / MIB
    return Found(more, "MiB", ok=abs(more) < 1)


@check("E5", "exact reduction over fast, one rank", expected="<= 3 % more", limit_s=100, must=False)
def exact(context: Context) -> Found:
    fast, _ = _ratio(_measured(context, "fast", "--syncs"))
    ratio, note = _ratio(_measured(context, "exact", "--reduction", "exact"))
    more = 100 * (ratio / fast - 1)
    return Found(more, "%", note, ok=context.dry or more <= 3.0)


@check(
    "E6",
    "a rank whose device takes longer is named",
    expected="that rank, and no other",
    limit_s=90,
    must=False,
    not_dry="own time is of the device's events; on hosts it is benchmarks/slow_ranks.py",
)
def own_time(context: Context) -> Found:
    slow = 1
    arguments = ["--wrap", "ddp", "--steps", "300", "--sleep-ms", "30", "--slow-rank", str(slow)]
    options = ["--slow-ranks", "notice", "--slow-after", "3"]
    with Job(context, "job", "train.py", arguments, ranks=3, options=options) as job:
        job.finish()
        said = job.said(20_000)
    told = [line for line in said.splitlines() if "slow" in line.lower() and "rank" in line.lower()]
    if not told:
        return failed("nobody was called slow, though rank 1's device sleeps 30 ms in each step")
    others = [line for line in told if f"rank {slow}" not in line]
    return (
        failed(f"somebody else was called slow: {others[0]}") if others else Found(len(told), "notices", told[0][:160])
    )


@check(
    "E7",
    "waits for the device in rackrun's own frames, a step",
    expected="<= 1",
    limit_s=90,
    must=False,
    not_dry=_GPU_ONLY,
)
def syncs(context: Context) -> Found:
    end = next(one for one in _measured(context, "fast", "--syncs") if one["what"] == "end")
    return Found(end["syncs"], "a step", ", ".join(end["places"][:8]), ok=end["syncs"] <= 1)


@check("E8", "the same training twice", expected="equal bits", limit_s=100)
def twice(context: Context) -> Found:
    steps, differ = context.pick(60, 24), []
    for wrap in context.pick(["ddp", "fsdp"], ["ddp"]):
        one = reference(context, wrap, steps)
        other = train(context, f"again-{wrap}", wrap=wrap, steps=steps, double="")
        differ += [f"{wrap}: {what}" for what in compare(one, other, 3)]
    if differ:
        return failed(f"{len(differ)} differences: {'; '.join(differ[:3])}")
    if not context.dry:
        import torch

        context.note(f"TF32 {torch.backends.cuda.matmul.allow_tf32}, cuDNN benchmark {torch.backends.cudnn.benchmark}")
    return Found(
        "equal", note=f"{steps} steps; in a dry run once as NCCL and once as gloo" if context.dry else f"{steps} steps"
    )


@check("E9", "a gradient scaler and mixed precision: one swap", expected="bit-equal", limit_s=90)
def scaler(context: Context) -> Found:
    steps = context.pick(40, 14)
    undisturbed = train(context, "undisturbed", wrap="ddp", steps=steps, more=("--amp",), double="")
    strikes = [{"rank": 1, "step": steps // 3, "place": "backward", "what": "kill", "after": None}]
    lines = train(context, "struck", wrap="ddp", steps=steps, strikes=strikes, spares=1, more=("--amp",))
    if sum(line["what"] == "strike" for line in lines) != 1:
        return failed("the strike was not done: the run proves nothing")
    if different := compare(undisturbed, lines, 3):
        return failed(f"{len(different)} differences: {'; '.join(different[:3])}")
    return Found(max(recoveries(lines), default=0.0), "s")


@check(
    "E10",
    "a compiled model in FSDP2, one swap",
    expected="runs; bit-equal",
    limit_s=120,
    must=False,
    not_dry="compiling for the host takes a minute; tests/worker has it",
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
