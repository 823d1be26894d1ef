"""Progress of the job, from the commits that ranks report, for the status line."""

from __future__ import annotations

from collections import deque

import msgspec

from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Position, Rank
from rackrun.protocol.wire import Logged, UnitCommitted, UnitSealed

__all__ = ["UnreportedCommits", "Ledger", "JobProgress"]

_WINDOW = 64
"""Number of positions that are kept while some ranks' commits are missing."""
_RATE_MS = 10_000.0
_PLANS_MAX = 16
"""Number of plans whose members are remembered."""


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job is, for people."""

    position: Position
    """The latest unit that any rank has reported as committed."""
    complete: Position
    """The latest unit that every rank of its world has reported."""
    steps: int
    """Number of different steps committed since this coordinator began."""
    steps_per_s: float
    samples_per_s: float
    values: dict[str, float | int | str]
    """Values of the last ``run.log``."""


class Ledger:
    """Counts commits. It stores no rows; those go to the journal."""

    def __init__(self) -> None:
        self.position = BEGIN
        self.complete = BEGIN
        self.began: Position | None = None
        """The first unit that any rank has reported as committed; None: none yet."""
        self.steps = 0
        self.values: dict[str, float | int | str] = {}
        self._open: dict[Position, dict[Rank, int]] = {}
        self._recent: deque[tuple[float, int]] = deque()  # (time, samples) of each complete step

    def commit(self, unit: UnitCommitted, world_size: int, now_ms: float) -> bool:
        """Record a commit. Return whether the whole world has now committed ``unit.at``, for the first time."""
        if self.began is None:
            self.began = unit.at
        if unit.at > self.position:
            if unit.at.phase == 0:
                self.steps += 1
            self.position = unit.at
        if unit.at <= self.complete:
            return False  # known already: a step repeated after a rollback, or a late rank
        ranks = self._open.setdefault(unit.at, {})
        ranks[unit.rank] = len(unit.ids) // 8
        if len(ranks) < world_size:
            while len(self._open) > _WINDOW:
                del self._open[min(self._open)]
            return False
        del self._open[unit.at]
        self.complete = unit.at
        for old in [at for at in self._open if at < unit.at]:
            del self._open[old]
        if unit.at.phase == 0:
            self._recent.append((now_ms, sum(ranks.values())))
        return True

    def logged(self, line: Logged) -> None:
        """Remember the values that the script logged last."""
        self.values = line.values

    def progress(self, now_ms: float) -> JobProgress:
        """Return the progress at ``now_ms``, with rates over the last moments."""
        recent = self._recent
        while recent and recent[0][0] < now_ms - _RATE_MS:
            recent.popleft()
        span_s = (now_ms - recent[0][0]) / 1e3 if len(recent) > 1 else 0.0
        return JobProgress(
            position=self.position,
            complete=self.complete,
            steps=self.steps,
            steps_per_s=(len(recent) - 1) / span_s if span_s > 0 else 0.0,
            samples_per_s=sum(samples for _, samples in list(recent)[1:]) / span_s if span_s > 0 else 0.0,
            values=self.values,
        )


class UnreportedCommits:
    """Units that a rank may have committed before it died without reporting. The next plan decides whether they
    count."""

    def __init__(self) -> None:
        self._open: dict[Rank, UnitSealed] = {}
        self._plans: deque[GenerationPlan] = deque(maxlen=_PLANS_MAX)

    def record(self, unit: UnitSealed) -> None:
        """Record a unit. It counts for the rank that the worker held when it computed it, which may have changed
        since."""
        for plan in self._plans:
            for member in plan.members if plan.generation == unit.generation else ():
                if (member.slot, member.incarnation) == (unit.slot, unit.incarnation):
                    self._open[member.rank] = unit

    def settle(self, plan: GenerationPlan) -> list[UnitCommitted]:
        """Return the units that ``plan`` counts, as the ranks would have reported them. The others are forgotten."""
        end = plan.committed if plan.rollback is None else Position(plan.rollback)
        counted = [(rank, unit) for rank, unit in self._open.items() if unit.at <= end]
        self._open.clear()
        self._plans.append(plan)
        return [
            UnitCommitted(
                slot=unit.slot,
                incarnation=unit.incarnation,
                generation=unit.generation,
                rank=rank,
                at=unit.at,
                gate=plan.gate if unit.at == plan.committed else (),
                ids=unit.ids,
            )
            for rank, unit in counted
        ]
