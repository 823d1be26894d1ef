"""Holds the exchange's rooms in which communicators of one generation are built, and closes all at once when it is
replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rackrun.worker.communicators.exchange_store import ExchangeStore

__all__ = ["ExchangeRooms"]


class ExchangeRooms:
    """The open rooms of one generation. ``enter``: opens the room with the given name."""

    def __init__(self, enter: Callable[[str], ExchangeStore]) -> None:
        self._enter = enter
        self._lock = threading.Lock()
        self._open: list[ExchangeStore] = []
        self._closed = False

    def enter(self, name: str) -> ExchangeStore:
        """Open the room ``name``. It is closed from the start if nobody will use what is being built; its calls raise
        then."""
        store = self._enter(name)
        with self._lock:
            self._open.append(store)
            closed = self._closed
        if closed:
            store.close()
        return store

    def leave(self, store: ExchangeStore) -> None:
        """Close one room."""
        with self._lock:
            if store in self._open:
                self._open.remove(store)
        store.close()

    def close(self) -> None:
        """Close all rooms, so that waiting calls raise `RuntimeError`. Any thread, any number of times."""
        with self._lock:
            self._closed = True
            stores, self._open = self._open, []
        for store in stores:
            store.close()
