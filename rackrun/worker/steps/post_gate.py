"""Judges collectives that break after the gate has passed, when the step counts and cannot be undone any more.

Most are harmless, such as a loss or an accuracy reduced over the ranks for display. A collective that averages weights
is not: this rank's state is then neither the one before it nor the one after. The tracked state tells them apart. A
break is harmless if the collective has not written to tracked state, and that state has the same bits at the end of the
step as when the collective broke.
"""

from __future__ import annotations

import threading
from typing import Any

from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.multi_part_steps import writes_tracked

__all__ = ["PostGateFailures"]


class PostGateFailures:
    """The collectives of the current unit that broke after its gate."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._content: int | None = None
        self._written = False

    def begin_unit(self) -> None:
        """Forget the breaks of the unit before."""
        self._content, self._written = None, False

    def record(self, result: Any) -> None:
        """Record that a collective broke. ``result``: the tensors that it was to write, nested in lists. Safe to call
        in any thread."""
        with self._lock:
            if self._state.gathered or writes_tracked(self._state, result):
                # while FSDP has gathered whole parameters it is unknown whether a shard was written
                self._written = True
            elif self._content is None:
                self._content = self._state.content(buffers=True)

    @property
    def any(self) -> bool:
        """Whether a collective broke after the gate of this unit."""
        return self._written or self._content is not None

    def corrupted_state(self) -> bool:
        """Whether a broken collective has corrupted the tracked state. To be called at the end of the unit."""
        return self._written or (self._content is not None and self._content != self._state.content(buffers=True))
