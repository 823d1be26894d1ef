"""Compute what a report's plots show, for the template of its page.

Where there are too many values they are thinned, and each plot says how.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rackrun.chaos.evidence.history import Placed
from rackrun.chaos.evidence.run_evidence import gate_of
from rackrun.chaos.report.analysis.downsample import Envelope, envelope, every_nth
from rackrun.chaos.report.analysis.journal_timeline import JournalTimeline
from rackrun.chaos.report.analysis.recovery_chains import Chain, stages_of
from rackrun.chaos.report.analysis.report_data import Material
from rackrun.chaos.report.analysis.slot_occupancy import seats_of
from rackrun.coordinator.report.goodput import Goodput
from rackrun.pages.plots import Bar, Chart, Curve, Span

__all__ = ["GOODPUT", "LossPlot", "Plots", "RecoveryWaterfall", "losses", "plots_of"]

POINTS = 1_000
"""The most points of a curve: more than a screen has columns."""
BARS = 16
DIFFERENCES = 200
GOODPUT = (
    ("steps", "productive_s", "restore"),
    ("start-up", "startup_s", "resume"),
    ("recovery", "recovery_s", "fault"),
    ("done again", "redone_s", "detect"),
    ("hold", "hold_s", "decide"),
    ("other", "other_s", "break"),
)
"""What the time of a run is spent on: name, field of `Goodput`, colour. They add up to the wall time."""
STAGES = ("detect", "break", "decide", "regroup", "restore", "resume", "rework")
"""The stages of a recovery, each with the colour of its name."""
_SPANS = "a strike, up to the first step afterwards"


class LossPlot(NamedTuple):
    """The losses of both runs. They are compared by bits, step by step, before anything is thinned."""

    chart: Chart | None
    """None: no step was committed."""
    compared: int
    differ: int
    differing: list[tuple[int, float | None, float | None]]
    """The first steps that differ, each with its loss without faults and with them; None: not a finite number."""
    missing: int
    """How many steps of the other run this one has not."""
    reference: bool
    each: int
    """How many steps a point of the chart stands for."""


class RecoveryWaterfall(NamedTuple):
    """The recoveries, or the longest of them."""

    bars: list[Bar]
    legend: list[tuple[str, str]]
    """The stages that occur, each with the name of its colour."""
    all: int
    strikes: int


class MapSlot(NamedTuple):
    """A slot on the map of racks."""

    name: str
    first: int | None
    """The rank there at the start."""
    last: int | None
    """The rank there at the end."""
    strikes: list[int]
    took: list[str]
    """Whom it took over, and from where: ``rank 1 from tray-00/1``."""
    used: bool
    """Whether a worker was ever there."""


class Plots(NamedTuple):
    """What all plots of a page show."""

    losses: LossPlot
    progress: Chart | None
    waterfall: RecoveryWaterfall
    goodput: list[Bar]
    racks: dict[str, dict[str, list[MapSlot]]]


def plots_of(material: Material) -> Plots:
    """Return what the plots of a run show."""
    job, reference, chains = material.job, material.reference, material.chains
    return Plots(
        losses(job, reference, chains),
        progress(job, reference, chains),
        waterfall(job, chains),
        goodput(material.summary.goodput, material.summary.reference_goodput),
        rack_map([one for one in material.history if isinstance(one, Placed)], job, chains),
    )


def losses(job: JournalTimeline | None, reference: JournalTimeline | None, chains: Sequence[Chain]) -> LossPlot:
    """Return the losses of the steps, without phases."""
    mine, theirs = (of.losses() if of is not None else {} for of in (job, reference))
    steps = sorted(step for step, phase in mine.keys() | theirs.keys() if not phase)
    both = [step for step in steps if (step, 0) in mine and (step, 0) in theirs]
    differing = [step for step in both if mine[step, 0][:8] != theirs[step, 0][:8]]
    curves = [Curve("with faults", "faulted", 1.5, _curve(mine))]
    if reference is not None:
        curves.insert(0, Curve("without faults", "reference", 5, _curve(theirs)))
    chart = None
    if values := [value for curve in curves for row in curve.rows for value in row[2:]]:
        low, high = min(values), max(values)
        pad = high * 0.04 - low * 0.04 or abs(high) * 0.04 or 1
        widen = min(0.5, (steps[-1] - steps[0]) / 400)
        spans = [
            Span(first - widen, last + widen, _strike(chain))
            for chain in chains
            for first in [chain.step + 1]
            for last in [first if chain.first_step is None else chain.first_step]
        ]
        chart = Chart(
            label="loss of each step in both runs",
            unit="step",
            height=226,
            x=(steps[0], max(steps[-1], steps[0] + 1)),
            y=(max(low - pad, -sys.float_info.max), min(high + pad, sys.float_info.max)),
            x_text="step {:.0f}",
            curves=curves,
            spans=spans,
            spans_label=_SPANS,
        )
    return LossPlot(
        chart,
        compared=len(both),
        differ=len(differing),
        differing=[(step, _loss(theirs[step, 0]), _loss(mine[step, 0])) for step in differing[:DIFFERENCES]],
        missing=sum((step, 0) not in mine for step in steps),
        reference=reference is not None,
        each=max(1, -(-len(steps) // POINTS)),
    )


def _loss(gate: bytes) -> float | None:
    value = gate_of(gate).loss if gate else math.nan
    return value if math.isfinite(value) else None


def _curve(gates: dict[tuple[int, int], bytes]) -> list[Envelope]:
    points = [
        (step, loss) for (step, phase), gate in sorted(gates.items()) if not phase and (loss := _loss(gate)) is not None
    ]
    return envelope(points, POINTS)


def _strike(chain: Chain) -> str:
    return f"strike {chain.strike.strike}: {chain.fault}"


def progress(job: JournalTimeline | None, reference: JournalTimeline | None, chains: Sequence[Chain]) -> Chart | None:
    """Return the commits of steps over time in both runs; a rollback goes down. None: no step was committed."""
    curves = [
        Curve("without faults", "reference", 4, _commits(reference)),
        Curve("with faults", "faulted", 1.5, _commits(job)),
    ]
    rows = [row for curve in curves for row in curve.rows]
    if not rows:
        return None
    first, end = min(row[0] for row in rows), max(row[0] for row in rows)
    return Chart(
        label="committed steps over time in both runs",
        unit="seconds since the start",
        height=166,
        x=(max(0.0, first - 0.05 * (end - first)), end),
        y=(0, max(1.0, *(row[2] for row in rows))),
        x_text="{:.2f} s",
        y_text="step {:.0f}",
        curves=curves,
        spans=[Span(chain.at_s, chain.until_s, _strike(chain)) for chain in chains],
        spans_label=_SPANS,
    )


def _commits(job: JournalTimeline | None) -> list[tuple[float, float, float, float]]:
    rows = sorted((unit.at_s, unit.step) for unit in job.units if not unit.phase) if job is not None else []
    return [(at_s, at_s, step, step) for at_s, step in every_nth(rows, POINTS)]


def waterfall(job: JournalTimeline | None, chains: Sequence[Chain]) -> RecoveryWaterfall:
    """Return a bar for each strike that needed a recovery; where there are more than `BARS`, the longest ones."""
    bars = []
    for chain in chains:
        stages = stages_of(chain, job) if job is not None else []
        if parts := [(one.name, one.name, round(one.to_s - one.from_s, 5)) for one in stages]:
            name = f"#{chain.strike.strike} {chain.fault} of {', '.join(chain.strike.whom)}"
            rungs = chain.recovery.rungs if chain.recovery is not None else ()
            bars.append(Bar(f"{name} → {rungs[-1]}" if rungs else name, parts))
    shown = sorted(bars, key=lambda bar: -sum(part[2] for part in bar.parts))[:BARS] if len(bars) > BARS else bars
    occur = {part[:2] for bar in shown for part in bar.parts}
    return RecoveryWaterfall(shown, sorted(occur, key=lambda key: STAGES.index(key[0])), len(bars), len(chains))


def goodput(faulted: Goodput | None, reference: Goodput | None) -> list[Bar]:
    """Return a bar for each run that has reported a step: its seconds by what they were spent on."""
    return [
        Bar(label, [(name, colour, getattr(of, field)) for name, field, colour in GOODPUT])
        for label, of in (("with faults", faulted), ("without", reference))
        if of is not None
    ]


def rack_map(
    places: Sequence[Placed], job: JournalTimeline | None, chains: Sequence[Chain]
) -> dict[str, dict[str, list[MapSlot]]]:
    """Return rack -> tray -> slots: the ranks there at the start and at the end, strikes, and takeovers."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    if job is not None and job.plans:
        first = {str(m.slot): int(m.rank) for m in job.plans[0].plan.members}
        last = {str(m.slot): int(m.rank) for m in job.plans[-1].plan.members}
    struck: dict[str, list[int]] = {}
    for chain in chains:
        for slot, _ in chain.strike.slots:
            struck.setdefault(slot, []).append(chain.strike.strike)
    took: dict[str, list[str]] = {}
    for recovery in job.recoveries if job is not None else ():
        for one in recovery.lost:
            if one.to and one.to != one.slot:
                took.setdefault(str(one.to), []).append(f"rank {one.rank} from {one.slot}")
    used = {seat.slot for seat in seats_of(job)} if job is not None else set()
    racks: dict[str, dict[str, list[MapSlot]]] = {}
    for place in sorted(places, key=lambda one: (one.rack, one.tray, _index(one.slot))):
        slot = place.slot
        shown = MapSlot(slot, first.get(slot), last.get(slot), struck.get(slot, []), took.get(slot, []), slot in used)
        racks.setdefault(place.rack, {}).setdefault(place.tray, []).append(shown)
    return racks


def _index(slot: str) -> int:
    index = slot.rpartition("/")[2]
    return int(index) if index.isdigit() else 0
