"""A loop that the script drives by calls, one for each step, instead of ``for step in run.steps(n)``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar, cast

from rackrun.errors import StepError
from rackrun.worker.data.rng import reseed
from rackrun.worker.loop.unit_runner import UnitRunner
from rackrun.worker.membership.decisions.interruptions import LoopDrained
from rackrun.worker.steps.turns import Turn, decoded

__all__ = ["NO_END", "DrivenLoop"]

T = TypeVar("T")

NO_END = 2**39
"""The number of steps of a loop that has none of its own."""


class DrivenLoop:
    """The loop of `rackrun.Run.do`. A process that takes a rank over, or resumes, makes the same calls from the first
    on; those that are committed do nothing."""

    def __init__(self, numbers: Generator[int, None, None], units: UnitRunner, turn: Turn, seed: int) -> None:
        """Begin the loop; a spare waits here. ``numbers``: yields the steps to run, the last committed one first."""
        self._numbers, self._units, self._turn, self._seed = numbers, units, turn, seed
        self._calls = 0
        self._reached = next(numbers, -1)
        """The step that was yielded last."""
        turn.after_step(-1)

    def call(self, step: Callable[[], T]) -> T | None:
        """Make the next call: run ``step()``, or return what the others have where its step is committed. Raises
        `LoopDrained` when the job is to end instead, and `StepError` for a call that the others have not made."""
        number, self._calls = self._calls, self._calls + 1
        if number < self._reached or self._units.left_early:
            return self._skip(number)
        if number > self._reached:
            self._end_turn()
        assert self._reached == number, "one call for each step"
        return step()

    def goes_on(self, condition: Callable[[], bool]) -> bool:
        """Return ``condition()``, or True while committed calls follow."""
        return self._is_behind or bool(condition())

    def end(self) -> None:
        """End the last turn, with the phases that are due after its step, when the script's loop is over. Raises
        `StepError` if it has ended before it came to where the other ranks are."""
        if self._is_behind and not self._units.draining:
            raise StepError(
                f"the loop of run.do ended after {self._calls} steps on this process, which goes through the calls that are committed: on the "
                f"other ranks it went on to step {self._units.last_in_body.step}. It was decided by tracked objects, which are of later turns here.",
                remedy="write `while run.goes_on(lambda: ...)`; elsewhere decide by what the process counts itself.",
            )

        if self._calls > self._reached and not self._units.left_early:  # the step of the last turn was called
            next(self._numbers, None)
        self._numbers.close()

    @property
    def _is_behind(self) -> bool:
        return self._turn.place < self._units.last_in_body

    def _end_turn(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            raise LoopDrained
        self._reached = number

    def _skip(self, number: int) -> T | None:
        left = self._units.left_after
        if left is not None and number > left:
            raise StepError(
                f"run.do was called for step {number}, and the other ranks have left their loop after step {left}.",
                remedy="decide how long the loop goes on by tracked objects, which a process that takes a rank over has.",
            )
        self._turn.after_step(number)
        reseed(self._seed, "after", number)
        return cast("T", decoded(self._units.results.step)) if number == left else None
