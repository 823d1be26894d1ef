"""Thin out data of which there is too much, so that nothing important is lost. Merged data says how much it
stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rackrun.chaos.report.analysis.journal_timeline import RankUnit
from rackrun.chaos.report.analysis.recovery_chains import Chain

__all__ = ["StepBucket", "Detail", "choose_detail", "envelope", "every_nth", "lanes", "merged"]

_T = TypeVar("_T")
BLOCKS = 64
"""The fewest blocks into which a rank's undisturbed steps are merged, if they must be."""


@dataclass(frozen=True)
class Detail:
    """Which steps are shown one by one."""

    steps: frozenset[int] | None
    """The steps that are shown one by one; None: all."""
    ranks: frozenset[int] | None = None
    """The ranks of which they are shown; None: all."""
    block: int = 1
    """How many of the other steps are merged into one block."""

    def wanted(self, rank: int, step: int) -> bool:
        return self.steps is None or (step in self.steps and (self.ranks is None or rank in self.ranks))


class StepBucket(NamedTuple):
    """Steps of one rank that are shown as one."""

    first: RankUnit
    last: RankUnit
    units: int
    from_s: float
    slowest_s: float


def choose_detail(chains: Sequence[Chain], steps: int, ranks: int, most: int) -> Detail:
    """Choose which steps to show one by one.

    All steps are shown if they give at most ``most`` slices. Otherwise it is those around strikes, with as wide a
    margin as possible; if these are still too many, only those of ranks that were struck.
    """
    if steps * ranks <= most:
        return Detail(None)
    block = -(-steps // BLOCKS)
    spans = [_span(chain) for chain in chains]
    for margin in (32, 8, 2, 1, 0):
        near = frozenset(s for low, high in spans for s in range(max(0, low - margin), min(steps, high + margin + 1)))
        if (len(near) + len(spans)) * ranks <= most:
            return Detail(near, block=block)
    struck = {int(whom.split(" ")[1]) for chain in chains for whom in chain.strike.whom if whom.startswith("rank ")}
    near = frozenset(s for low, high in spans for s in (low, high) if 0 <= s < steps)
    return Detail(near, ranks=frozenset(sorted(struck)[: max(1, most // (2 * len(near) or 1))]), block=block)


def _span(chain: Chain) -> tuple[int, int]:
    """Return the steps from the strike to the first one afterwards."""
    low = chain.step + 1
    return low, max(low, chain.first_step if chain.first_step is not None else low)


def merged(units: Iterable[RankUnit], detail: Detail) -> Iterator[RankUnit | StepBucket]:
    """Yield units, and blocks of merged units. ``units``: those of one rank, in the order of time."""
    held: list[RankUnit] = []

    def block() -> Iterator[RankUnit | StepBucket]:
        if len(held) == 1:
            yield held[0]
        elif held:
            begin_s = held[0].at_s - held[0].seconds
            yield StepBucket(held[0], held[-1], len(held), begin_s, max(unit.seconds for unit in held))
        held.clear()

    for unit in units:
        if detail.wanted(unit.rank, unit.step):
            yield from block()
            yield unit
        else:
            if held and unit.step // detail.block != held[-1].step // detail.block:
                yield from block()
            held.append(unit)
    yield from block()


class Envelope(NamedTuple):
    """The smallest and the largest value between two steps."""

    first: int
    last: int
    low: float
    high: float


def envelope(points: Sequence[tuple[int, float]], most: int) -> list[Envelope]:
    """Return at most ``most`` buckets of equally many points, each with its smallest and largest value, so that no
    spike is lost."""
    size = max(1, -(-len(points) // most))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part]
        found.append(Envelope(part[0][0], part[-1][0], min(values), max(values)))
    return found


def every_nth(rows: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` of the rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each span the lowest lane that is free at that time. ``spans``: sorted by their beginning."""
    ends: list[float] = []
    found = []
    for begin, end in spans:
        lane = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        found.append(lane)
    return found
