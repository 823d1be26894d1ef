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
        self._exchange.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._exchange.get(key, _DEFAULT.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set ``key`` if it has no value, whatever is ``expected``, and return its value: the first value stays."""
        del expected
        self.set(key, desired)
        return self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._exchange.wait(list(keys), (timeout or _DEFAULT).total_seconds())

    def close(self) -> None:
        self._exchange.close()
