"""Delivers what ranks broadcast before ``run.steps()`` to spares, which are in no group yet.

Such values are a configuration that rank 0 has read, or the name of the run. The root stores them in the exchange; a
spare calls the same collectives in the same order and reads them from there. Only small values are kept. Parameters are
not: a spare keeps its own until it takes over a rank, and receives that rank's then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from rackrun.link.exchange import Exchange, ExchangeTimeout
from rackrun.protocol.boot import Boot
from rackrun.worker.tensors.tensor_lists import are_plain

__all__ = ["Broadcasts"]

_BYTES_MAX = 2**20
"""The largest size of one broadcast that is kept, in bytes."""
_ALL_BYTES_MAX = 2**23
_COUNT_MAX = 4096
_NOT_KEPT, _KEPT = b"-", b"+"
_NO_MORE = "no more"
_CONNECT_S = 10.0
_WAIT_S = 120.0
"""How long a spare waits for a value, in seconds. It may be much faster than the rank that reads the data."""


class Broadcasts:
    """The broadcasts of one process. Does nothing in a world without spares: alone, or under torchrun."""

    def __init__(self, boot: Boot | None) -> None:
        self._boot = boot if boot is not None and boot.exchange else None
        self._turns: Counter[str] = Counter()
        self._room: Exchange | None = None
        """The connection to the exchange. It stays open, because a room lasts as long as somebody is in it."""
        self._address = boot.exchange if boot is not None else ""
        self._known: dict[str, bytes] = {}
        """All values that this process has given or taken, to be stored in another exchange should this one be lost."""
        self._bytes = self._count = 0
        self._over = False

    def begin_again(self) -> None:
        """Restart the counts, as ``main`` is entered again: its broadcasts have the same values as the first time, or
        are not asked for."""
        self._turns.clear()

    def republish_at(self, address: str) -> None:
        """Store all known values in the exchange at ``address``, which the world uses from now on: later spares look
        there."""
        if self._boot is None or address == self._address:
            return
        self._address, room, self._room = address, self._room, None
        if room is not None:
            room.close()
        if not self._known:
            return
        try:
            room = self._enter()
            for turn, value in self._known.items():
                room.set(turn, value)
            self._over = self._count >= _COUNT_MAX
            if self._over:
                room.set(_NO_MORE, b"")
        except ExchangeTimeout:
            self._over = True

    def next_key(self, group: str) -> str:
        """Count a broadcast in ``group``, and return its key, which is the same on all ranks and spares."""
        self._turns[group] += 1
        return f"{group}/{self._turns[group]}"

    def publish(self, turn: str, tensors: Sequence[torch.Tensor]) -> None:
        """Store the value of a broadcast in the exchange; called on the root. Larger values are only marked as not
        kept."""
        if self._over or self._boot is None:
            return
        size = sum(tensor.nbytes for tensor in tensors)
        keep = size <= _BYTES_MAX and self._bytes + size <= _ALL_BYTES_MAX and all(map(_is_plain, tensors))
        self._bytes, self._count = self._bytes + size * keep, self._count + 1
        value = _KEPT + b"".join(map(_bytes_of, tensors)) if keep else _NOT_KEPT
        try:
            room = self._enter()
            room.set(turn, self._known.setdefault(turn, value))
            if self._count >= _COUNT_MAX:
                self._over = True
                room.set(_NO_MORE, b"")
        except ExchangeTimeout:
            self._over = True  # without the exchange no group can be built either, which reports the error

    def receive(self, turn: str, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the value of a broadcast into ``tensors``; called on a spare. They stay unchanged when the value was not
        kept."""
        if self._over or self._boot is None:
            return
        try:
            room = self._enter()
            if not room.check([turn]) and room.check([_NO_MORE]):
                return
            value = self._known[turn] = room.get(turn, _WAIT_S)
        except ExchangeTimeout:
            self._over = True
            return
        if value[:1] == _KEPT and len(value) == 1 + sum(tensor.nbytes for tensor in tensors):
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8)[1:]
            for tensor in tensors:
                mine, data = data[: tensor.nbytes], data[tensor.nbytes :]
                tensor.copy_(mine.clone().view(tensor.dtype).view(tensor.shape))

    def _enter(self) -> Exchange:
        assert self._boot is not None
        if self._room is None:
            name = f"broadcasts/{self._boot.restarts}"
            self._room = Exchange(self._address, self._boot.token, name, _CONNECT_S)
        return self._room


def _is_plain(tensor: torch.Tensor) -> bool:
    return are_plain([tensor]) and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
