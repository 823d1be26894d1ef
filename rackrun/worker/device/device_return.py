"""Checks that a device comes back after a break, and ends the rank if it does not.

A break ends the collectives that run on the device; other kernels end on their own. If the device does not come back, a
kernel hangs or the device has failed, and nothing that this rank repeats would be done. So the rank ends itself, and
another takes its place. The agent's limits would detect it, too, but only after as long as a step may take, and without
the reason. The main thread may be in a CUDA call that cannot be interrupted, so the control thread keeps the limit.
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
"""The time in seconds that a device may compute without any collective, while that is not known from earlier units."""


class DeviceReturn:
    """The return of one device. ``rank``: returns the current rank, for the message. ``clock`` and ``leave`` are
    replaced in tests."""

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
        """Returns the longest time of a unit in seconds, or 0 while it is unknown."""
        self._clock, self._leave = clock, leave
        self._over: threading.Event | None = None
        """Set when the device is back after the last break; None: it has come back, or there was no break."""
        self._failed = ""
        self._broke_s = 0.0

    def break_begins(self) -> None:
        """Note that the communicators are about to be broken: `wait` blocks from now on."""
        if not self._queue.is_host:
            self._broke_s, self._failed = self._clock(), ""
            self._over = threading.Event()

    def watch_device(self) -> None:
        """Start to wait for the device in a thread, when the communicators are being broken and no work is added any
        more."""
        if self._over is not None:
            threading.Thread(
                target=self._synchronise, args=[self._over], name="rackrun-device-return", daemon=True
            ).start()

    def wait(self) -> None:
        """Wait until the device has come back from the last break. `check` bounds this wait."""
        while (over := self._over) is not None:
            over.wait()
            if over is self._over:
                return

    def check(self) -> None:
        """End this rank if its device has failed or has not come back in time. Called at intervals."""
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
        """The time limit in seconds: work that was enqueued before the break may be a good part of a unit, and has to
        end first."""
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
