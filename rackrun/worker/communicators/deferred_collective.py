"""A collective that was called before its communicator exists; the thread that builds the communicator starts it later.

The caller goes on, and only a wait blocks, as with any other collective. On a device the collective comes after what
its caller had enqueued at the time of the call, not after what it has enqueued since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DeferredWork"]


class DeferredWork(dist.Work):
    """The work of a collective that may not have begun yet."""

    def __init__(
        self, call: Callable[[], Sequence[dist.Work]], place: AbstractContextManager[None], *, has_future: bool
    ) -> None:
        """``call`` enqueues the collective within ``place``, and returns its works. ``has_future``: it returns one
        work, whose future completes on the host."""
        super().__init__()
        self._call: Callable[[], Sequence[dist.Work]] | None = call
        self._place = place
        self._lock = threading.Lock()
        self._settled = False
        self._known = threading.Event()
        """Set when the collective has begun, or never will."""
        self._works: Sequence[dist.Work] = ()
        self._error: Exception | None = None
        self.refused = False
        """Whether the call itself failed, perhaps because of wrong arguments."""
        self._future: torch.futures.Future[Any] | None = torch.futures.Future() if has_future else None

    def begin(self) -> None:
        """Begin the collective. One thread calls this, and then `wake_waiters` and `complete_future`. Raises nothing;
        `wait` raises the error."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            with self._place:
                works = call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._settle((), error, refused=True)
        else:
            self._settle(works, None)

    def fail(self, error: Exception) -> None:
        """Record that the collective will not begin. Does nothing once it has begun."""
        self._settle((), error)
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the threads that wait, which then wait for the collective itself."""
        self._known.set()

    def complete_future(self) -> None:
        """Complete the future once the collective is over. Runs in a thread that nobody waits for, because callbacks of
        others are attached to the future."""
        if self._future is None:
            return
        if self._error is not None:
            self._future.set_exception(self._error)
        else:
            self._works[0].get_future().add_done_callback(self._over)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective. ``timeout`` limits its beginning, and each of its parts.

        Raises `RuntimeError` when it fails, or has not ended in time; in that case it may be waited for again.
        """
        if not self._known.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the communicator is still being built")
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all parts are started and have completed; never waits."""
        return self._known.is_set() and all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether it has completed without an error."""
        return self.is_completed() and self._error is None

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is not None:
            return self._future
        self._known.wait()
        if self._error is not None:
            raise RuntimeError(str(self._error))
        if len(self._works) != 1:
            raise RuntimeError("several works have no future")
        return self._works[0].get_future()

    def _settle(self, works: Sequence[dist.Work], error: Exception | None, *, refused: bool = False) -> None:
        with self._lock:
            if self._settled:
                return
            self._works, self._error, self.refused = works, error, refused
            self._settled, self._call = True, None

    def _over(self, inner: torch.futures.Future[Any]) -> None:
        assert self._future is not None, "hung on it"
        try:
            self._future.set_result(inner.value())
        except RuntimeError as error:
            self._future.set_exception(error)
