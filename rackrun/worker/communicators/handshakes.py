"""Counts handshakes of communicators during a unit. Each has a limit of its own, so a collective that waits for one is
no stall."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Handshakes"]


class Handshakes:
    """The handshakes in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def are_under_way(self) -> bool:
        """Whether any handshake is in progress."""
        return self._count > 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Context manager that counts one handshake."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
