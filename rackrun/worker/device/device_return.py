"""Whether a device comes back after a break.

A break ends the collectives that the device is in; what is computed around them ends by itself. If it does not, a kernel hangs, or the device has
failed, and nothing that this rank could do again would be done. So the rank ends itself, and another takes its place: the agent's limits would find
it too, but only after as long as a step may take, and could not say why. The main thread may be in a call of CUDA's that cannot be left; the control
thread keeps the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rackrun.worker.device.device_queue import DeviceQueue
from rackrun.worker.device.rank_exit import leave

__all__ = ["DeviceReturn"]

RETURNS_S = 5.0
_UNITS = 2
_FIRST_UNITS_S = 60.0
"""Where nobody knows yet how long the device computes without any collective."""


class DeviceReturn:
    """``rank`` is asked when it is needed."""

    def __init__(
        self,
        queue: DeviceQueue,
        rank: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int, str], None] = leave,
    ) -> None:
        self._queue, self._rank = queue, rank
        self.unit_s: Callable[[], float] = lambda: 0.0
        """The seconds that a unit takes at the most, as far as is known; 0: it is not."""
        self._clock, self._leave = clock, leave
        self._over: threading.Event | None = None
        """Of the last break; None: the device came back, or there was none."""
        self._failed = ""
        self._broke_s = 0.0

    def breaks(self) -> None:
        """Its communicators are about to be broken: `wait` waits from now on."""
        if not self._queue.is_host:
            self._broke_s, self._failed = self._clock(), ""
            self._over = threading.Event()

    def broke(self) -> None:
        """They are being broken: what the device has to do is what it has now."""
        if self._over is not None:
            threading.Thread(
                target=self._synchronise, args=[self._over], name="rackrun-device-return", daemon=True
            ).start()

    def wait(self) -> None:
        """Until the device came back from the last break. Not for ever: see `look`."""
        while (over := self._over) is not None:
            over.wait()
            if over is self._over:
                return

    def look(self) -> None:
        """Asked now and then: end this rank if its device fails, or does not come back in time."""
        over = self._over
        if over is None:
            return
        if over.is_set():
            self._over = None
            return
        limit_s = self.limit_s
        if self._failed:
            self._end(f"has failed: {self._failed}")
        elif self._clock() - self._broke_s > limit_s:
            self._end(f"did not come back within {limit_s:g} s after a break: a kernel hangs in it, or it has failed")

    @property
    def limit_s(self) -> float:
        """What was enqueued before the break may be a good part of a unit, which has to end first."""
        known = self.unit_s()
        return RETURNS_S + (_UNITS * known if known else _FIRST_UNITS_S)

    def _end(self, because: str) -> None:
        self._leave(self._rank(), f"gives its place up: its {self._queue.name} {because}; another takes its place.")

    def _synchronise(self, over: threading.Event) -> None:
        self._queue.use()
        try:
            self._queue.synchronise()
        except RuntimeError as error:
            self._failed = str(error).partition("\n")[0] or type(error).__name__
        else:
            over.set()
