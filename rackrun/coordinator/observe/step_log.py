"""Lines of ``run.log``: one for each step, in order, from whichever rank reports first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, unit_text
from rackrun.protocol.wire import Logged

__all__ = ["StepLog", "step_line"]


class StepLog:
    """Prints the first report of each ``run.log`` call and drops those of other ranks.

    Of several that arrive together, the lowest rank's is used. A position older than the latest printed one is dropped,
    because a step that is repeated after a rollback is reported again. Different calls within one step are told apart
    by the names of their values, and equal ones by how often the worker has made them in one generation; in the next
    generation it may compute the latest position again.
    """

    def __init__(self, emit: Callable[[str, Logged], None]) -> None:
        self._emit = emit
        self._newest = BEGIN
        self._since = Generation(0)
        self._printed: Counter[tuple[str, ...]] = Counter()
        self._heard: Counter[tuple[Incarnation, Generation, tuple[str, ...]]] = Counter()

    def allow_again(self, plan: GenerationPlan) -> bool:
        """Allow steps after ``plan.rollback`` to be printed again in its generation, if their values were wrong. Return
        whether any of them was printed."""
        if not plan.anew or plan.rollback is None or Position(plan.rollback) >= self._newest:
            return False
        self._newest, self._since = Position(plan.rollback), plan.generation
        self._printed.clear()
        self._heard.clear()
        return True

    def print_first(self, logged: Iterable[Logged]) -> None:
        """Handle lines that arrived together, in the order of each sender."""
        for line in sorted(logged, key=lambda one: (one.at, one.rank)):
            if line.at < self._newest or line.generation < self._since:
                continue
            if line.at > self._newest:
                self._newest = line.at
                self._printed.clear()
                self._heard.clear()
            call = tuple(line.values)
            told = line.incarnation, line.generation, call
            self._heard[told] += 1
            if self._heard[told] > self._printed[call]:
                self._printed[call] += 1
                self._emit(step_line(line), line)


def step_line(line: Logged) -> str:
    """Return a line such as ``step 12  loss 2.3123  lr 0.0003``."""
    return "  ".join(
        [unit_text(line.at), *(f"{_one_line(name)} {_value(value)}" for name, value in line.values.items())]
    )


def _value(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
    return _one_line(str(value))


def _one_line(text: str) -> str:
    """Return the text with line ends and other control characters escaped."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )
