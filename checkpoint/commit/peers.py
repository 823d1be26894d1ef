"""Messages between ranks about checkpoints: short, through a key-value store, never through a process group.

Each thread that waits has a connection of its own (`Peers.another`). A connection answers one request at a time, and a
wait on the connection that training uses would hold up training. A single process uses a store in its own memory.

A wait of the store cannot be interrupted, so it is split into short waits, and `Peers.stop` is checked between them.
torchrun may keep one store through its restarts, with messages of dead ranks, so every start draws a random key prefix,
agreed by one broadcast. The file of a file store (``init_method="file://..."``) is never cloned: the end of a clone
counts as the end of a rank, and the last rank removes the file.
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
    """This rank's view of the key-value store that all ranks share."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, stopped: threading.Event | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._stopped = store, stopped or threading.Event()

    @classmethod
    def of_default_group(cls, name: str) -> Peers:
        """Return the ranks of the default process group, connected through its store. Collective.

        Without a process group it is this process alone. ``name`` separates the keys of different jobs.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(dist.HashStore(), 0, 1)
        store = dist.distributed_c10d._get_default_store()
        own = dist.PrefixStore(f"rackrun.checkpoint/{name}/{_drawn():x}", _clone(store))
        return cls(own, dist.get_rank(), dist.get_world_size())

    def another(self) -> Peers:
        """Return the same ranks and keys through a connection of its own. `stop` ends both."""
        return Peers(_clone(self._store), self.rank, self.world_size, self._stopped)

    def say(self, key: str, message: object) -> None:
        """Store a message under a key. Raises `PeersGone`."""
        try:
            self._store.set(key, msgspec.json.encode(message).decode())
        except RuntimeError as error:
            raise _gone(key, error) from error

    def hear(self, keys: Sequence[str], kind: type[M], *, seconds: float) -> list[M]:
        """Wait until all keys have a message, at most ``seconds``, and return the messages. Raises `PeersGone`."""
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
        """Return the values of all ranks, in the order of ranks.

        Collective; use each ``key`` once. Raises `PeersGone`.
        """
        self.say(f"{key}/{self.rank}", mine)
        return self.hear([f"{key}/{rank}" for rank in range(self.world_size)], type(mine), seconds=seconds)

    def hear_first(self, key: str, mine: M | None, kind: type[M], *, seconds: float) -> M:
        """Return the value that rank 0 passes as ``mine``, on all ranks. Raises `PeersGone`."""
        if self.rank == 0:
            self.say(key, mine)
        return self.hear([key], kind, seconds=seconds)[0]

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys that all ranks have read. Raises `PeersGone`."""
        try:
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError as error:
            raise _gone("", error) from error

    def stop(self) -> None:
        """Make all waits, now and later, raise `PeersGone`."""
        self._stopped.set()


def _drawn() -> int:
    """Return a random number, the same on all ranks. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    number = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(number, src=0)
    return int(number)


def _clone(store: dist.Store) -> dist.Store:
    """Return a store with a connection of its own, where the store has connections."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.HashStore | dist.FileStore):  # these stores have no connection to share
        return store
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    return own


def _gone(key: str, error: Exception) -> PeersGone:
    said = str(error).partition("\n")[0]
    return PeersGone(
        f"the other ranks did not answer ({key}: {said:.200}).", remedy="see why they have stopped, or are slow."
    )
