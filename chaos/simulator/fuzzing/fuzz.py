"""Run many seeds, and find the smallest plan with which a failing seed still fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import msgspec

from rackrun.chaos.plan.definition import Heal, Par, Part
from rackrun.chaos.plan.shrink_plan import fewest
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob, Simulation, SimulationOutcome
from rackrun.chaos.simulator.fuzzing.draw_job import draw_job
from rackrun.core.machine.control_plane import ControlPlane

__all__ = ["Tally", "play", "reduce", "sweep"]

CHUNK = 50


def play(seed: int, core: type[ControlPlane] = ControlPlane) -> SimulationOutcome:
    """Run the job of a seed from its start to its end."""
    return Simulation(draw_job(seed), core).run()


@dataclass(slots=True)
class Tally:
    """The results of many seeds."""

    seeds: int = 0
    core_events: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    """Seed -> the invariant that did not hold."""

    def add(self, outcome: SimulationOutcome) -> None:
        """Count one outcome."""
        self.seeds += 1
        self.core_events += outcome.core_events
        self.marks.update(outcome.marks)
        if outcome.violation:
            self.failed[outcome.seed] = outcome.violation
        elif outcome.stopped is not None:
            self.exits[str(outcome.stopped.exit_code)] += 1

    def merge(self, other: Tally) -> None:
        """Add the results of another tally."""
        self.seeds += other.seeds
        self.core_events += other.core_events
        self.exits.update(other.exits)
        self.marks.update(other.marks)
        self.failed.update(other.failed)


def _chunk(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(play(seed))
    return tally


def sweep(seeds: Iterable[range], jobs: int = 1) -> Iterator[tuple[range, Tally]]:
    """Run the seeds in chunks, and yield each chunk with its results, in order."""
    chunks = [range(at, min(at + CHUNK, part.stop)) for part in seeds for at in range(part.start, part.stop, CHUNK)]
    if jobs == 1:
        yield from ((chunk, _chunk(chunk)) for chunk in chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(chunks, pool.map(_chunk, chunks), strict=True)


def reduce(
    seed: int, core: type[ControlPlane] = ControlPlane, *, tries: int = 400
) -> tuple[SimulatedJob, SimulationOutcome] | None:
    """Reduce the faults of a seed that fails, to as few as still fail, in whatever way.

    Returns None if the seed does not fail when its faults strike by name and step, as
    `rackrun.chaos.plan.conductor.Conductor.resolved` gives them.
    """
    job = draw_job(seed)
    outcome = Simulation(job, core).run()
    if not outcome.violation or outcome.resolved is None:
        return None

    def fails(parts: list[Part]) -> SimulationOutcome | None:
        tried = Simulation(_with(job, parts), core).run()
        return tried if tried.violation else None

    resolved = outcome.resolved.plan
    parts: list[Part] = list(resolved.parts) if isinstance(resolved, Par) else []
    again = fails(parts)
    if again is None:
        return None
    parts, best = fewest(parts, again, fails, tries)
    return _with(job, parts), best


def _with(job: SimulatedJob, parts: list[Part]) -> SimulatedJob:
    plan = Par(parts=tuple(parts)) if parts else Heal()
    return replace(job, plan=msgspec.structs.replace(job.plan, plan=plan))
