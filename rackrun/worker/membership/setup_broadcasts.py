"""What ranks broadcast before ``run.steps()`` reaches spares too, which are in no group yet: a configuration that rank 0 has read, the name of
the run. The root leaves it with the exchange; a spare calls the same collectives in the same order, and takes it from there.

Only what is small is kept: parameters are not, which a spare is given when it takes a rank over. Then it keeps its own.
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
"""Of one."""
_ALL_BYTES_MAX = 2**23
_COUNT_MAX = 4096
_NOT_KEPT, _KEPT = b"-", b"+"
_NO_MORE = "no more"
_CONNECT_S = 10.0
_WAIT_S = 120.0
"""A spare may be much faster than the rank that reads the data."""


class Broadcasts:
    """Of one process. Not of a world without spares: alone, or under torchrun."""

    def __init__(self, boot: Boot | None) -> None:
        self._boot = boot if boot is not None and boot.exchange else None
        self._turns: Counter[str] = Counter()
        self._room: Exchange | None = None
        """Stays open: the room lasts as long as somebody is in it."""
        self._address = boot.exchange if boot is not None else ""
        self._known: dict[str, bytes] = {}
        """What this process has given or taken: for another exchange, should this one be lost."""
        self._bytes = self._count = 0
        self._over = False

    def begin_again(self) -> None:
        """``main`` is entered again: what is said then is what was said the first time, or is not asked for."""
        self._turns.clear()

    def move(self, address: str) -> None:
        """The world meets at another exchange from now on, where spares that begin later look for what was said."""
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

    def turn(self, group: str) -> str:
        """Each rank, and each spare, asks for each broadcast in ``group``: it counts the same on all."""
        self._turns[group] += 1
        return f"{group}/{self._turns[group]}"

    def give(self, turn: str, tensors: Sequence[torch.Tensor]) -> None:
        """On the root."""
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
            self._over = True  # without it no group can be built either: whoever needs it says so

    def take(self, turn: str, tensors: Sequence[torch.Tensor]) -> None:
        """On a spare. ``tensors`` stay as they are when it was not kept."""
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
