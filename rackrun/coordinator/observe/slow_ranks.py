"""Detection of slow ranks from the own times that come with every committed step.

`rackrun.core.stragglers.straggler_detection` judges them. This observer receives what the driver handles, and creates
an event for the core when the set of slow ranks changes. Between the break of a generation and the next plan it ignores
everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rackrun.core.placement.mesh_resize import fitted
from rackrun.core.stragglers.straggler_detection import Limits, RankPlace, Stragglers
from rackrun.protocol.commands import BreakGeneration, Command, GenerationPlan, ResumeGeneration
from rackrun.protocol.events import Event, SlowRanksChanged, WorkerReady
from rackrun.protocol.ids import Position, Rank
from rackrun.protocol.wire import UnitCommitted

__all__ = ["SlowMetrics", "SlowWatch"]

_OPEN_MAX = 64
"""Number of steps that are kept while some ranks have not reported them."""
_PARTING = ("pp",)
"""Axes whose positions do different work."""


class SlowMetrics(Collector):
    """Metrics of slow ranks, collected when Prometheus reads them."""

    def __init__(self) -> None:
        self.slow = 0
        self.own_s: Callable[[], Sequence[float]] = tuple

    def collect(self) -> Iterable[GaugeMetricFamily]:
        own = GaugeMetricFamily(
            "rackrun_own_seconds", "A step's own time: what a rank did not wait for others.", labels=["rank"]
        )
        for rank, seconds in enumerate(self.own_s()):
            if not math.isnan(seconds):
                own.add_metric([str(rank)], seconds)
        yield own
        yield GaugeMetricFamily("rackrun_slow_ranks", "Ranks that are slower than their peers for long.", self.slow)


class SlowWatch:
    """Detects slow ranks. ``after_s``: about how long a rank must have been behind, in seconds; None: no detection."""

    def __init__(
        self, after_s: float | None, changed: Callable[[SlowRanksChanged], None], metrics: SlowMetrics
    ) -> None:
        self._changed, self._metrics = changed, metrics
        limits = Limits()
        self._stragglers = None if after_s is None else Stragglers(Limits(row_s=after_s / limits.window))
        self._plan: GenerationPlan | None = None
        self._axes: tuple[tuple[str, int], ...] = ()
        self._open: dict[Position, dict[Rank, UnitCommitted]] = {}
        self._rests: deque[float] = deque(maxlen=limits.window)
        self._meets = False
        """Whether ranks with different samples took part in a micro-batch's collectives in any step so far."""
        if self._stragglers is not None:
            metrics.own_s = self._stragglers.own_s

    def on_event(self, event: Event) -> None:
        if isinstance(event, WorkerReady) and event.mesh and event.mesh != self._axes:
            self._axes = event.mesh
            self._begin()

    def on_command(self, command: Command) -> None:
        match command:
            case BreakGeneration():
                self._plan = None
            case ResumeGeneration():
                self._plan = command.plan
                self._begin()
            case _:
                pass

    def committed(self, unit: UnitCommitted) -> None:
        """Add a rank's own time in a committed unit."""
        plan, stragglers = self._plan, self._stragglers
        if stragglers is None or plan is None or unit.generation != plan.generation or unit.at.phase:
            return
        ranks = self._open.setdefault(unit.at, {})
        ranks[unit.rank] = unit
        if len(ranks) < plan.world_size:
            while len(self._open) > _OPEN_MAX:
                del self._open[min(self._open)]
            return
        del self._open[unit.at]
        units = [ranks[rank] for rank in sorted(ranks)]
        if any(one.own <= 0 for one in units):
            return  # disturbed, or not known
        self._meets |= any(one.meets for one in units)
        self._rests.append(_rest(units))
        verdict = stragglers.step(_for_equal_work(units), max(one.seconds for one in units))
        if verdict is not None:
            self._metrics.slow = len(verdict.slow)
            self._changed(
                SlowRanksChanged(
                    generation=plan.generation,
                    slow=verdict.slow,
                    everybody=verdict.everybody,
                    rest=round(median(self._rests), 3),
                    meets=self._meets,
                )
            )

    def _begin(self) -> None:
        self._open.clear()
        if self._stragglers is not None and self._plan is not None:
            groups = _groups(self._axes, self._plan.world_size)
            members = zip(self._plan.members, groups, strict=True)
            self._stragglers.world([RankPlace(member.slot, member.incarnation, group) for member, group in members])


def _for_equal_work(units: Sequence[UnitCommitted]) -> list[float]:
    """Return own seconds as if each rank had computed the same number of micro-batches."""
    passes = sum(unit.passes for unit in units) / len(units)
    return [unit.own + _in_passes(unit) * (passes / unit.passes - 1) if unit.passes else unit.own for unit in units]


def _in_passes(unit: UnitCommitted) -> float:
    return min(unit.in_passes or unit.own, unit.own)


def _rest(units: Sequence[UnitCommitted]) -> float:
    """Return the median rank's time besides its micro-batches, in units of one micro-batch."""
    return median(
        (unit.own - _in_passes(unit)) * unit.passes / _in_passes(unit) if unit.passes else 0.0 for unit in units
    )


def _groups(axes: tuple[tuple[str, int], ...], size: int) -> list[int]:
    """Return for each rank a number for its position along the axes that divide the work.

    Ranks are row-major. The world may have shrunk or grown along its data axis since ``axes`` were reported.
    """
    axes = fitted(axes, size)
    if not axes:
        return [0] * size
    found = []
    for rank in range(size):
        left, group = rank, 0
        for name, length in reversed(axes):
            left, at = divmod(left, length)
            if name in _PARTING:
                group = group * length + at
        found.append(group)
    return found
