"""Records when a rank reached each stage of a recovery; ``benchmarks/waterfall.py`` draws the recovery from these
times.

broken    its collectives are broken                 copied    newcomer: all bytes have arrived
parked    its main thread has left the old unit      verified  newcomer: they are its sources' bytes
planned   it has the plan of the new generation      served    source: the newcomer has read what it needs
built     its groups are built                       resumed   the recovery is over
noted     the unit's initial state is recorded       computed  first unit: forward and backward are over
entered   it enters the gate                         passed    the gate has passed
"""

from __future__ import annotations

import time

__all__ = ["RecoveryStages"]


class RecoveryStages:
    """Milliseconds until each stage, by the stage's name.

    The time begins when this rank learns that its generation is broken or, on a spare, when it receives the plan that
    names it. Both threads of a worker write. Nothing is recorded outside a recovery.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._at_ms: dict[str, float] = {}

    def begin(self) -> None:
        """Start the clock: a generation is broken, or names this process. A recovery in progress is measured anew from
        here."""
        self._at_ms.clear()
        self._began = time.monotonic()

    def reached(self, stage: str) -> None:
        """Record that ``stage`` is reached now. Where a stage is reached again, because a newer generation has replaced
        this one, the last time counts."""
        if self._began is not None:
            self._at_ms[stage] = round((time.monotonic() - self._began) * 1e3, 2)

    def collect(self) -> dict[str, float]:
        """Return all stages and stop the clock, once the first unit after the recovery is committed. Empty when there
        was no recovery."""
        if self._began is None:
            return {}
        self._began = None
        return self._at_ms.copy()
