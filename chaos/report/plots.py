"""Compute the values in a report's plots, as plain values for its page.

Where there are too many values they are thinned, and each figure says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rackrun.chaos.evidence.history import Placed
from rackrun.chaos.evidence.run_evidence import gate_of
from rackrun.chaos.report.analysis.downsample import envelope, every_nth
from rackrun.chaos.report.analysis.journal_timeline import JournalTimeline
from rackrun.chaos.report.analysis.recovery_chains import Chain, stages_of
from rackrun.chaos.report.analysis.report_data import Material
from rackrun.chaos.report.analysis.slot_occupancy import seats_of
from rackrun.coordinator.report.run_report import Goodput

__all__ = ["figures_of"]

POINTS = 1_000
"""The most points of a curve: more than a screen has columns."""
BARS = 16
DIFFERENCES = 200

Figure = dict[str, Any]


def figures_of(material: Material) -> Figure:
    """Return the name of each plot -> its values."""
    return {
        "losses": losses(material.job, material.reference, material.chains),
        "progress": progress(material.job, material.reference, material.chains),
        "waterfall": waterfall(material.job, material.chains),
        "goodput": goodput(material.summary.goodput, material.summary.reference_goodput),
        "map": rack_map([one for one in material.history if isinstance(one, Placed)], material.job, material.chains),
    }


def losses(job: JournalTimeline | None, reference: JournalTimeline | None, chains: Sequence[Chain]) -> Figure:
    """Return the losses of the steps, without phases.

    ``curves``: [first step, last step, smallest, largest]. The difference is judged by bits, step by step, before
    anything is thinned.
    """
    mine = job.losses() if job is not None else {}
    theirs = reference.losses() if reference is not None else {}
    steps = sorted(step for step, phase in mine.keys() | theirs.keys() if not phase)
    differing = [
        [step, _loss(theirs.get((step, 0))), _loss(mine.get((step, 0)))]
        for step in steps
        if (step, 0) in mine and (step, 0) in theirs and mine[step, 0][:8] != theirs[step, 0][:8]
    ]
    return {
        "curves": {"reference": _curve(theirs), "faulted": _curve(mine)},
        "compared": sum((step, 0) in mine and (step, 0) in theirs for step in steps),
        "differing": differing[:DIFFERENCES],
        "differ": len(differing),
        "missing": sum((step, 0) not in mine for step in steps),
        "reference": reference is not None,
        "faults": [
            [
                chain.step + 1,
                chain.first_step if chain.first_step is not None else chain.step + 1,
                chain.fault,
                chain.strike.strike,
            ]
            for chain in chains
        ],
        "steps": [steps[0], steps[-1]] if steps else [0, 0],
        "each": max(1, -(-len(steps) // POINTS)),
    }


def _loss(gate: bytes | None) -> float | None:
    value = gate_of(gate).loss if gate else math.nan
    return value if math.isfinite(value) else None


def _curve(gates: dict[tuple[int, int], bytes]) -> list[list[float]]:
    points = [
        (step, loss) for (step, phase), gate in sorted(gates.items()) if not phase and (loss := _loss(gate)) is not None
    ]
    return [[one.first, one.last, _digits(one.low), _digits(one.high)] for one in envelope(points, POINTS)]


def progress(job: JournalTimeline | None, reference: JournalTimeline | None, chains: Sequence[Chain]) -> Figure:
    """Return [seconds, step] for each commit of a step, in both runs; a rollback goes down."""
    return {
        "curves": {"reference": _commits(reference), "faulted": _commits(job)},
        "faults": [[round(c.at_s, 3), round(c.until_s, 3), c.fault, c.strike.strike] for c in chains],
    }


def _commits(job: JournalTimeline | None) -> list[list[float]]:
    if job is None:
        return []
    rows = sorted((unit.at_s, unit.step) for unit in job.units if not unit.phase)
    return [[round(at_s, 3), step] for at_s, step in every_nth(rows, POINTS)]


def waterfall(job: JournalTimeline | None, chains: Sequence[Chain]) -> Figure:
    """Return a bar for each strike that needed a recovery; where there are more than `BARS`, the longest ones."""
    bars: list[Figure] = []
    for chain in chains:
        stages = stages_of(chain, job) if job is not None else []
        if stages:
            rung = chain.recovery.rungs[-1] if chain.recovery is not None and chain.recovery.rungs else ""
            bars.append(
                {
                    "strike": chain.strike.strike,
                    "name": f"{chain.fault} of {', '.join(chain.strike.whom)}",
                    "rung": rung,
                    "stages": [[stage.name, round(1e3 * (stage.to_s - stage.from_s), 2)] for stage in stages],
                }
            )
    shown = sorted(bars, key=lambda bar: -sum(ms for _, ms in bar["stages"]))[:BARS]
    if len(bars) <= BARS:
        shown = bars
    return {"bars": shown, "all": len(bars), "strikes": len(chains)}


def goodput(faulted: Goodput | None, reference: Goodput | None) -> Figure:
    """Return the seconds of both runs by what they were spent on. They add up to the wall time."""

    def parts(of: Goodput | None) -> list[list[Any]]:
        if of is None:
            return []
        named = (
            ("steps", of.productive_s),
            ("start-up", of.startup_s),
            ("recovery", of.recovery_s),
            ("done again", of.redone_s),
            ("other", of.other_s),
        )
        return [[name, round(seconds, 3)] for name, seconds in named]

    return {
        "faulted": parts(faulted),
        "reference": parts(reference),
        "ettr": None if faulted is None else round(faulted.ettr_since_first_step, 5),
        "reference_ettr": None if reference is None else round(reference.ettr_since_first_step, 5),
    }


def rack_map(places: Sequence[Placed], job: JournalTimeline | None, chains: Sequence[Chain]) -> Figure:
    """Return the racks with their trays and slots: the ranks there at the start and at the end, strikes, and
    takeovers."""
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
    racks: dict[str, dict[str, dict[str, Any]]] = {}
    for place in sorted(places, key=lambda one: (one.rack, one.tray, _index(one.slot))):
        racks.setdefault(place.rack, {}).setdefault(place.tray, {})[place.slot] = None
    for slots in (tray for rack in racks.values() for tray in rack.values()):
        for slot in slots:
            slots[slot] = {
                "slot": slot,
                "first": first.get(slot),
                "last": last.get(slot),
                "struck": struck.get(slot, [])[:20],
                "strikes": len(struck.get(slot, [])),
                "took": took.get(slot, [])[-5:],
                "used": slot in used,
            }
    return {
        "racks": [
            {"rack": rack, "trays": [{"tray": tray, "slots": list(slots.values())} for tray, slots in trays.items()]}
            for rack, trays in racks.items()
        ]
    }


def _index(slot: str) -> int:
    index = slot.rpartition("/")[2]
    return int(index) if index.isdigit() else 0


def _digits(value: float) -> float:
    return float(f"{value:.7g}")
