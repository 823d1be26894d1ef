"""When a rank came to each stage of a recovery: what a waterfall of it is drawn from (``benchmarks/waterfall.py``).

broken    its collectives are broken                 copied    a newcomer: all bytes have arrived
parked    its main thread has left the old unit      verified  a newcomer: they are its sources' bytes
planned   it has the plan of the new generation      served    a source: the newcomer has read what it needs
built     its groups are built                       resumed   the recovery is over
noted     it has noted what the unit may change      computed  forward and backward of the first unit are over
entered   it enters the gate                         passed    the gate has passed
"""

from __future__ import annotations

import time

__all__ = ["RecoveryStages"]


class RecoveryStages:
    """Milliseconds since this rank was told that its generation is broken, or, as a spare, of the plan that names it, by the name of the stage.

    Both threads of a worker write. Outside a recovery nothing is recorded.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._at_ms: dict[str, float] = {}

    def begin(self) -> None:
        """A generation is broken, or names this process. A recovery that was going on is measured from here."""
        self._at_ms.clear()
        self._began = time.monotonic()

    def reached(self, stage: str) -> None:
        """Now. A stage that comes again, because a newer generation overtook this one, is told as of the last time."""
        if self._began is not None:
            self._at_ms[stage] = round((time.monotonic() - self._began) * 1e3, 2)

    def take(self) -> dict[str, float]:
        """All of them, once: the first unit after the recovery has been committed. Empty when there was no recovery."""
        if self._began is None:
            return {}
        self._began = None
        return self._at_ms.copy()
