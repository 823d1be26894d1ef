"""The exchange's rooms of one generation, for whoever builds communicators in it: all are closed at once when it is overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rackrun.worker.communicators.exchange_store import ExchangeStore

__all__ = ["Rooms"]


class Rooms:
    def __init__(self, enter: Callable[[str], ExchangeStore]) -> None:
        self._enter = enter
        self._lock = threading.Lock()
        self._open: list[ExchangeStore] = []
        self._closed = False

    def enter(self, name: str) -> ExchangeStore:
        """Closed from the start where nobody will use what is being built: whoever asks it raises."""
        store = self._enter(name)
        with self._lock:
            self._open.append(store)
            closed = self._closed
        if closed:
            store.close()
        return store

    def leave(self, store: ExchangeStore) -> None:
        with self._lock:
            if store in self._open:
                self._open.remove(store)
        store.close()

    def close(self) -> None:
        """Whoever waits in one raises RuntimeError. Any thread, any number of times."""
        with self._lock:
            self._closed = True
            stores, self._open = self._open, []
        for store in stores:
            store.close()
