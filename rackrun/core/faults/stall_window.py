"""The reports of ranks without progress, how long they are gathered, and who is to blame by them.

`rackrun.core.faults.stalls` says what is done about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rackrun.core.generation.restore_sources import named
from rackrun.core.members.transitions import STORY_MAX, next_state
from rackrun.protocol.events import WorkerStalled
from rackrun.protocol.ids import Rank

__all__ = ["WINDOW_TRANSITIONS", "Blame", "StallWindow", "WindowState", "WindowTrigger", "seconds_text", "stands"]


@dataclass(frozen=True, slots=True)
class Blame:
    """The result of a judgement: the ranks to blame, and why."""

    ranks: tuple[Rank, ...]
    """The ranks to blame; (): none, so the step is repeated in place."""
    because: str
    again: tuple[object, ...] = ()
    """Equal for the same stall of the same ranks in the same places; (): the places are unknown or say nothing."""


class WindowState(StrEnum):
    """State of a window; `WINDOW_TRANSITIONS` says what leads from one to the next."""

    EMPTY = "empty"
    GATHERING = "gathering"
    GATHERED = "gathered"
    """Reports of all members are enough for a judgement."""
    DUE = "due"
    """The reports at hand are enough."""
    DEADLOCK = "deadlock"
    """So they are, because the ranks wait for each other."""


class WindowTrigger(StrEnum):
    """What moves a window from one state to the next."""

    REPORT = "report"
    GATHER = "gather"
    EXPIRE = "expire"
    COMPARE = "compare"
    LOCK = "lock"
    CLEAR = "clear"


_ALWAYS = {
    WindowTrigger.COMPARE: WindowState.DUE,
    WindowTrigger.LOCK: WindowState.DEADLOCK,
}
_REPORTED = _ALWAYS | {
    WindowTrigger.GATHER: WindowState.GATHERED,
    WindowTrigger.EXPIRE: WindowState.DUE,
    WindowTrigger.CLEAR: WindowState.EMPTY,
}
WINDOW_TRANSITIONS: Mapping[WindowState, Mapping[WindowTrigger, WindowState]] = {
    WindowState.EMPTY: _ALWAYS | {WindowTrigger.REPORT: WindowState.GATHERING},
    WindowState.GATHERING: _REPORTED,
    WindowState.GATHERED: _REPORTED,
    WindowState.DUE: _REPORTED,
    WindowState.DEADLOCK: _REPORTED,
}
"""The transition table. `docs/state_machines.md` draws it. A timer of an earlier window of the same generation may expire
in any state with reports."""


@dataclass(slots=True)
class StallWindow:
    """The present stalls of one generation."""

    reports: dict[Rank, WorkerStalled] = field(default_factory=dict)
    state: WindowState = WindowState.EMPTY
    _story: deque[str] = field(default_factory=lambda: deque([WindowState.EMPTY.value], STORY_MAX))

    def move(self, trigger: WindowTrigger) -> None:
        """Make one transition of the table. Raises `InvalidTransition`, and changes nothing, if there is none."""
        self.state = next_state("the window of stalls", self.state, trigger, WINDOW_TRANSITIONS, self._story)

    def add(self, rank: Rank, report: WorkerStalled) -> bool:
        """Add a report; return whether the window opens, because no other rank reports."""
        self.reports[rank] = report
        if self.state is WindowState.EMPTY:
            self.move(WindowTrigger.REPORT)
        return len(self.reports) == 1

    def forget(self, rank: Rank) -> None:
        """Drop a rank's report."""
        self.reports.pop(rank, None)
        if not self.reports and self.state is not WindowState.EMPTY:
            self.move(WindowTrigger.CLEAR)

    @property
    def is_due(self) -> bool:
        """Whether the reports at hand are enough for a judgement."""
        return self.state is WindowState.DUE or self.state is WindowState.DEADLOCK

    def may_judge(self, members: Collection[Rank]) -> bool:
        """Return whether the reports are enough for a judgement."""
        return self.is_due or (self.state is WindowState.GATHERED and self._all_report(members))

    def _all_report(self, members: Collection[Rank]) -> bool:
        return all(rank in self.reports for rank in members)

    def judge(self, members: Collection[Rank], returned: int = 0) -> Blame | None:
        """Return who is to blame; None if a rank that does not report works, and the others wait for it.

        ``returned`` is the number of further ranks that have returned from ``main``.
        """
        everybody = self._all_report(members)
        own = {rank: report.collective for rank, report in sorted(self.reports.items()) if not report.waiting}
        if not own and not everybody:
            return None
        counts = own or {rank: report.collective for rank, report in sorted(self.reports.items())}
        low, high = min(counts.values()), max(report.collective for report in self.reports.values())
        locked = ", and wait for each other" if self.state is WindowState.DEADLOCK else ""
        heard = f"{len(self.reports)} of {len(members)} ranks report{locked}"
        behind = tuple(rank for rank, count in counts.items() if count == low)
        if not own and low == high:
            behind = ()
        elif 2 * len(behind) > len(members) + returned:
            if not everybody:
                return None
            behind = ()
        if behind:
            others = f", others wait at {high}" if high > low else ""
            places = self._places(dict.fromkeys(behind))
            again = self._again(behind)
            return Blame(behind, f"at collective {low}{others} ({heard}){self._told(behind)}", again if places else ())
        where = (
            f"all stand at collective {low}" if low == high else f"most ranks stand at collective {low}, some at {high}"
        )
        apart = len({report.where for report in self.reports.values()}) > 1
        told = self._told(tuple(self.reports)) if apart else ""
        again = self._again(tuple(self.reports)) if apart and self._places(self.reports) else ()
        return Blame((), f"{where} ({heard}): the step is done again in place{told}", again)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state is not that of the reports."""
        assert bool(self.reports) == (self.state is not WindowState.EMPTY), (
            f"{self.state} with {len(self.reports)} reports"
        )

    def _places(self, ranks: Collection[Rank]) -> bool:
        """Return whether the places of these ranks are known."""
        return all(self.reports[rank].where for rank in ranks)

    def _again(self, ranks: Sequence[Rank]) -> tuple[object, ...]:
        return tuple(
            (rank, report.step, report.phase, report.unit, report.waiting, report.where)
            for rank, report in sorted(self.reports.items())
            if rank in ranks
        )

    def _told(self, behind: Sequence[Rank]) -> str:
        """Describe where these ranks stand and where the waiting ranks wait; "": not known."""
        groups: dict[tuple[bool, str], list[Rank]] = {}
        for rank, report in sorted(self.reports.items(), key=lambda item: (item[0] not in behind, item[0])):
            if report.unit or report.where:
                groups.setdefault((report.waiting, _place(report)), []).append(rank)
        if not groups:
            return ""
        where = "; ".join(
            f"{named(ranks)} {_verb(waiting, len(ranks))} in {place}" for (waiting, place), ranks in groups.items()
        )
        own = [
            self.reports[rank] for rank in behind if not self.reports[rank].waiting and self.reports[rank].allowed_ms
        ]
        hint = "; run.expect(seconds) allows more than " + seconds_text(own[0].allowed_ms) if own else ""
        return f": {where}{hint}"


def stands(report: WorkerStalled) -> str:
    """Describe where a rank is: ``waits in phase evaluate at train.py:31``."""
    return f"{_verb(report.waiting, 1)} in {_place(report)}"


def _verb(waiting: bool, ranks: int) -> str:
    return f"{'wait' if waiting else 'stand'}{'s' if ranks == 1 else ''}"


def _place(report: WorkerStalled) -> str:
    return f"{report.unit or 'its code'}{f' at {report.where}' if report.where else ''}"


def seconds_text(milliseconds: int) -> str:
    """Return a duration, given in milliseconds, in seconds: ``1.5 s``."""
    return f"{milliseconds / 1000:g} s"
