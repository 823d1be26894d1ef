"""How many handshakes of communicators are under way beside a unit, each with a limit of its own: meanwhile a collective that waits is no stall."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Handshakes"]


class Handshakes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def are_under_way(self) -> bool:
        return self._count > 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
