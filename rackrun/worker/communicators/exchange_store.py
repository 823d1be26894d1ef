"""Presents the exchange as a torch store, which gloo's handshake reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rackrun.link.exchange import Exchange

__all__ = ["ExchangeStore"]

_CONNECT_S = 10.0
_DEFAULT = timedelta(seconds=30)


class ExchangeStore(dist.Store):
    """One room of the exchange at ``address``. Raises `RuntimeError` where a store would; `close` interrupts a wait."""

    def __init__(self, address: str, token: str, room: str) -> None:
        super().__init__()
        self._exchange = Exchange(address, token, room, _CONNECT_S)

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``. A second value is ignored: the first stays."""
        self._exchange.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for the value of ``key``, for the default timeout at most, and return it."""
        return self._exchange.get(key, _DEFAULT.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all ``keys``, and return their values in the same order."""
        self.wait(keys)
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set ``key`` if it has no value, whatever is ``expected``, and return its value: the first value stays."""
        del expected
        self.set(key, desired)
        return self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` have values; never waits for one."""
        return self._exchange.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values; ``timeout`` None: the default."""
        self._exchange.wait(list(keys), (timeout or _DEFAULT).total_seconds())

    def close(self) -> None:
        """Close the connection to the exchange, which ends calls that wait in it."""
        self._exchange.close()
