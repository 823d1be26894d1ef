"""All mutants climb together, a rung a round, so that a total of machine time goes first to what notices most for least.

In each round every mutant that nobody has noticed yet runs its next rung, with an equal share of the time that is left. Time is what the runs
took, divided by how many ran at once: seconds of the machine, not of one core. To see whether the same test fails without the mistake is no part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.ladder import Rung, notices

__all__ = ["Climber", "climb"]

SHARE = 0.6
"""Of the time that is left, what a round may have when others follow it."""
LEAST_S = 3.0
"""No run of tests says anything in less."""


@dataclass
class Climber:
    """One mutant on its way up."""

    tree: Path
    rungs: Sequence[Rung]
    budget_s: float
    """For this one alone."""
    by: str = ""
    """Who noticed it; "": nobody yet."""
    rung: str = ""
    seconds: float = 0.0
    """Of its runs so far."""


class _Purse:
    """Seconds of the machine that are left."""

    def __init__(self, total_s: float, jobs: int) -> None:
        self._left_s, self._jobs, self._lock = total_s, jobs, threading.Lock()

    @property
    def left_s(self) -> float:
        return self._left_s

    def pay(self, seconds: float) -> None:
        with self._lock:
            self._left_s -= seconds / self._jobs


def climb(
    climbers: Sequence[Climber],
    well: Path,
    total_s: float,
    jobs: int,
    noticed: Callable[[Climber], None],
) -> float:
    """Seconds of the machine that it took. ``noticed`` is called for each as soon as it is, one at a time."""
    purse = _Purse(total_s, jobs)
    saying = threading.Lock()

    def step(climber: Climber, number: int, limit_s: float) -> None:
        limit_s = min(limit_s, purse.left_s, climber.budget_s - climber.seconds, climber.rungs[number].limit_s)
        if limit_s < LEAST_S:
            return
        by, seconds = notices(climber.tree, climber.rungs[number], well, limit_s)
        purse.pay(seconds)
        climber.seconds = round(climber.seconds + seconds, 1)
        if by:
            climber.by, climber.rung = by, climber.rungs[number].name
            with saying:
                noticed(climber)

    with ThreadPoolExecutor(jobs) as pool:
        for number, todo, last in _rounds(climbers):
            limit_s = purse.left_s * jobs / len(todo) * (1.0 if last else SHARE)
            for done in [pool.submit(step, climber, number, limit_s) for climber in todo]:
                done.result()
    return total_s - purse.left_s


def _rounds(climbers: Sequence[Climber]) -> Iterator[tuple[int, list[Climber], bool]]:
    """The number of the rung, who is on it, and whether nobody has another above it."""
    number = 0
    while todo := [one for one in climbers if not one.by and number < len(one.rungs)]:
        yield number, todo, all(number + 1 == len(one.rungs) for one in todo)
        number += 1
