"""Make the wall clocks of single processes jump, by `rackrun.chaos.testbed.machine.fake_clock`."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.chaos.injectors.common.injection import Missed, StrikeOutcome
from rackrun.chaos.testbed.machine.fake_clock import ClockPages, move
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import SetClock, UndoLog

__all__ = ["Stepped"]


class Stepped:
    """Wall clocks that have jumped. It has taken effect when each process reads its clock from the page that
    says so."""

    def __init__(self, processes: Sequence[Process], by_s: float, pages: ClockPages, undo: UndoLog) -> None:
        if not all(pages.mapped_by(process) for process in processes):
            raise Missed("it does not have the clock that can be moved")
        self._undo, self._by_s, self._processes, self._pages = undo, by_s, processes, pages
        paths = [pages.path(process) for process in processes]
        self._record = undo.record(SetClock(tuple(map(str, paths))))
        for path in paths:
            move(path, by_s)

    def outcome(self) -> StrikeOutcome:
        took = all(self._pages.mapped_by(process) for process in self._processes)
        return StrikeOutcome(
            took, f"{self._by_s:+g} s for {', '.join(str(process.pid) for process in self._processes)}"
        )

    def take_back(self) -> None:
        self._undo.heal(self._record)
