"""Limits how long a unit other than a step may go without progress: a phase, code between two steps, an entry of
``main``.

Steps are alike and have a deadline of their own (`rackrun.worker.steps.hang_deadlines`). Everything else varies: an
evaluation may take a tenth of a step or a hundred steps, on one rank or on all. So two limits follow from the observed
times. The *idle* limit holds for a rank that shows no sign of life: it computes nothing, reads and writes nothing. The
*busy* limit holds while it does. Where too little was observed the idle limit is long, and a third number says after
what time an idle rank is compared with the other ranks (`rackrun.core.faults.peer_times`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["ENTERS_AGAIN", "EXITS", "PEERS_LEAST_MS", "UNKNOWN", "Allowance", "UnitTimes", "compared_after_ms"]

_FACTOR, _BUSY_FACTOR = 3.0, 9.0
_IDLE_FLOOR_S, _BUSY_FLOOR_S, _VARIED_BUSY_FLOOR_S = 2.0, 30.0, 60.0
_ALIKE, _ALIKE_MIN, _RESOLUTION_S = 3.0, 5, 0.1
"""Times are regular if there are at least five and none is above three times their median; times below 0.1 s count as
0.1 s there."""
PEERS_LEAST_MS = 30_000
"""An idle rank without a history is compared with others after this many milliseconds: one rank may wait for something
that the others need not, such as a server's answer."""
_STEPS_IDLE, _STEPS_BUSY = 150.0, 300.0
"""The lowest idle and busy limits of units with irregular times, in usual steps."""


class Allowance(NamedTuple):
    """Limits for one unit: milliseconds without progress."""

    idle_ms: int
    busy_ms: int
    """The limit while the process is seen to work; 0 when work does not extend ``idle_ms``."""

    least_ms: int = 0
    """The idle time after which the rank is compared with the other ranks; 0 when its own history is enough and it
    never is."""

    def at_least(self, milliseconds: int) -> Allowance:
        """Return the limits, each raised to at least ``milliseconds``; limits of 0 stay."""
        if not milliseconds:
            return self
        return Allowance(*(max(limit, milliseconds) if limit else 0 for limit in self))

    def plus(self, milliseconds: int) -> Allowance:
        """Return the limits, each longer by ``milliseconds``; limits of 0 stay."""
        if not milliseconds:
            return self
        return Allowance(*(limit + milliseconds if limit else 0 for limit in self))


UNKNOWN = Allowance(600_000, 1_800_000, PEERS_LEAST_MS)
"""The limits for a unit that was never observed: it may compile, download, or save for the first time."""
EXITS = Allowance(300_000, 1_800_000, 12_000)
"""The limits for a process that was released: all training is done, and the script may have something to do after
it."""
ENTERS_AGAIN = Allowance(10_000, 60_000)
"""The lowest limits for a further entry of ``main``, which all ranks make at once."""


class UnitTimes:
    """The recent times of one kind of unit, in seconds, and its limits."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=64)
        self.longest_s = 0.0
        """The longest recorded time, in seconds; 0 when there is none."""

    def took(self, seconds: float) -> None:
        """Add the duration of a unit that passed, in seconds."""
        self._seconds.append(seconds)
        self.longest_s = max(self._seconds)

    def resized(self, times: float) -> None:
        """Scale the recorded times: the same work takes ``times`` as long from now on."""
        self._seconds = deque((seconds * times for seconds in self._seconds), maxlen=self._seconds.maxlen)
        self.longest_s = max(self._seconds, default=0.0)

    @property
    def regular(self) -> bool:
        """Whether the recorded times are regular: enough of them, and none far above the median."""
        if len(self._seconds) < _ALIKE_MIN:
            return False
        longest_s = self.longest_s
        # the second comparison sorts, and is rarely needed
        return longest_s <= _ALIKE * _RESOLUTION_S or longest_s <= _ALIKE * statistics.median(self._seconds)

    def entry(self) -> Allowance:
        """Return the limits for a further entry of ``main``, once the first was observed."""
        longest_ms = 1e3 * self.longest_s
        idle, busy = (math.ceil(factor * longest_ms) for factor in (_FACTOR, _BUSY_FACTOR))
        return Allowance(max(idle, ENTERS_AGAIN.idle_ms), max(busy, ENTERS_AGAIN.busy_ms))

    def allowance(self, step_s: float, patience: float = 1.0, *, mixed: bool = False) -> Allowance:
        """Return the limits for the next unit of this kind.

        ``step_s``: seconds of a usual step. ``patience``: factor for all limits, raised after an apparent hang was
        none. ``mixed``: the unit is not always the same code, so regular times do not predict the next one.
        """
        if not self._seconds:
            return UNKNOWN
        longest_s, regular = self.longest_s, self.regular
        if regular:
            idle, busy = _IDLE_FLOOR_S, _BUSY_FLOOR_S
        else:
            idle, busy = max(_IDLE_FLOOR_S, _STEPS_IDLE * step_s), max(_VARIED_BUSY_FLOOR_S, _STEPS_BUSY * step_s)
        if mixed:
            busy = max(busy, _VARIED_BUSY_FLOOR_S)
        idle = patience * max(idle, _FACTOR * longest_s)
        busy = max(patience * max(busy, _BUSY_FACTOR * longest_s), idle)
        least_ms = 0 if regular else compared_after_ms(longest_s, patience)
        return Allowance(math.ceil(1e3 * idle), math.ceil(1e3 * busy), least_ms if least_ms < 1e3 * idle else 0)


def compared_after_ms(longest_s: float, patience: float) -> int:
    """Return `Allowance.least_ms` for a unit with a short history, whose longest time is ``longest_s`` seconds."""
    return math.ceil(patience * max(PEERS_LEAST_MS, 1e3 * _FACTOR * longest_s))
