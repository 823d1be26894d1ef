"""What ranks say to each other about checkpoints: short messages in a key-value store, never through a process group.

Each thread that waits has a connection of its own (`Peers.another`): a connection answers one request at a time, and a wait
on the one that training uses would hold up training. A process that is alone talks to itself through a store in memory.

The traps: a store's wait cannot be interrupted, so it is made of short ones, between which `Peers.stop` is looked at. And
torchrun may keep one store through its restarts, with what the dead have said: every start draws a room of its own, by one
broadcast when it is made. A file that a group meets in (``init_method="file://..."``) is never cloned: the end of a clone counts as
that of a rank, and the last rank removes the file.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from rackrun.checkpoint.base.errors import CheckpointError

__all__ = ["Peers", "PeersGone"]

_WAIT_S = 0.25
M = TypeVar("M")


class PeersGone(CheckpointError):
    """The other ranks did not answer in time, or the store is gone."""


class Peers:
    def __init__(self, store: dist.Store, rank: int, world_size: int, stopped: threading.Event | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._stopped = store, stopped or threading.Event()

    @classmethod
    def of_default_group(cls, name: str) -> Peers:
        """All ranks of the default process group, through its store; this process alone when there is none. Collective."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(dist.HashStore(), 0, 1)
        store = dist.distributed_c10d._get_default_store()
        own = dist.PrefixStore(f"rackrun.checkpoint/{name}/{_drawn():x}", _clone(store))
        return cls(own, dist.get_rank(), dist.get_world_size())

    def another(self) -> Peers:
        """The same room, through a connection of its own; `stop` ends both."""
        return Peers(_clone(self._store), self.rank, self.world_size, self._stopped)

    def say(self, key: str, message: object) -> None:
        """Raises `PeersGone`."""
        try:
            self._store.set(key, msgspec.json.encode(message).decode())
        except RuntimeError as error:
            raise _gone(key, error) from error

    def hear(self, keys: Sequence[str], kind: type[M], *, seconds: float) -> list[M]:
        """The messages, once all are there. Raises `PeersGone`."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait(list(keys), timedelta(seconds=max(min(left, _WAIT_S), 0.001)))
                return [msgspec.json.decode(got, type=kind) for got in self._store.multi_get(list(keys))]
            except dist.DistNetworkError as error:
                raise _gone(keys[0], error) from error
            except (
                RuntimeError
            ) as error:  # it was not there in this short while; a FileStore's timeout has no type of its own
                if self._stopped.is_set() or left <= _WAIT_S:
                    raise _gone(keys[0], error) from error

    def gather(self, key: str, mine: M, *, seconds: float) -> list[M]:
        """What every rank has given, in the order of ranks. ``key`` is used once."""
        self.say(f"{key}/{self.rank}", mine)
        return self.hear([f"{key}/{rank}" for rank in range(self.world_size)], type(mine), seconds=seconds)

    def hear_first(self, key: str, mine: M | None, kind: type[M], *, seconds: float) -> M:
        """What rank 0 gives, on all ranks."""
        if self.rank == 0:
            self.say(key, mine)
        return self.hear([key], kind, seconds=seconds)[0]

    def forget(self, keys: Iterable[str]) -> None:
        """What everybody has heard."""
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError as error:
            raise _gone("", error) from error

    def stop(self) -> None:
        """Whoever waits, or begins to, gets `PeersGone`."""
        self._stopped.set()


def _drawn() -> int:
    """A number that rank 0 has drawn."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(number, src=0)
    return int(number)


def _clone(store: dist.Store) -> dist.Store:
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.HashStore | dist.FileStore):  # they have no connection to share
        return store
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    return own


def _gone(key: str, error: Exception) -> PeersGone:
    said = str(error).partition("\n")[0]
    return PeersGone(
        f"the other ranks did not answer ({key}: {said:.200}).", remedy="see why they have stopped, or are slow."
    )
