"""The TCPStores of a tray: one for the whole job, over which workers build groups, and one for each restart.

A plain script's ``init_process_group("env://")`` uses the store at MASTER_ADDR:MASTER_PORT without any prefix, so the keys
of two attempts would collide; it needs a fresh store each time. For each generation the first tray that starts a worker in
it claims the key ``rackrun/master/G/claim`` in the job's store, makes a new one and publishes where; the others read that.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import threading

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, which has no type
from torch.distributed import DistError

__all__ = ["Stores", "StoreUnreachable"]

_KEPT_GENERATIONS = 2
_BACKLOG = 1024  # torch's own is small: many workers connect at once


class StoreUnreachable(Exception):
    """The job's store did not answer in time."""


class Stores:
    """Hosts servers. `master` may be called from any thread; it blocks for up to ``timeout_s``."""

    def __init__(self, advertise: str, timeout_s: float = 30.0) -> None:
        self._advertise = advertise
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._base = self._serve()
        self.address = f"{advertise}:{self._base.port}"
        self._masters: dict[int, tuple[str, TCPStore | None]] = {}  # generation -> where, and ours if we host it

    def master(self, store: str, generation: int) -> str:
        """``host:port`` of the store that is fresh in ``generation``; ``store`` is the job's. Raises StoreUnreachable."""
        with self._lock:
            if generation not in self._masters:
                self._masters[generation] = self._find(store, generation)
                for old in [g for g in self._masters if g <= generation - _KEPT_GENERATIONS]:
                    del self._masters[old]
            return self._masters[generation][0]

    async def master_soon(self, store: str, generation: int) -> str:
        """`master` in a thread of its own, one that nobody has to wait for when the job ends meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def ask() -> None:
            try:
                found, error = self.master(store, generation), None
            except StoreUnreachable as unreachable:
                found, error = "", unreachable
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, found, error)

        def settle(found: str, error: StoreUnreachable | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)

        threading.Thread(target=ask, name="rackrun-store", daemon=True).start()
        return await answer

    def close(self) -> None:
        if self._lock.acquire(timeout=0.1):  # a lookup that still waits keeps its store until the process ends
            self._masters.clear()
            del self._base
            self._lock.release()

    def _find(self, store: str, generation: int) -> tuple[str, TCPStore | None]:
        key = f"rackrun/master/{generation}"
        try:
            base = self._base if store == self.address else self._connect(store)
            if base.add(f"{key}/claim", 1) > 1:
                return base.get(key).decode(), None
            server = self._serve()
            where = f"{self._advertise}:{server.port}"
            base.set(key, where)
        except (DistError, RuntimeError, OSError) as error:
            raise StoreUnreachable(f"no store for generation {generation} by way of {store}: {error}") from error
        return where, server

    def _connect(self, store: str) -> TCPStore:
        host, _, port = store.rpartition(":")
        # A refusal is final: the store was there before anybody was told of it. TCPStore itself would try for long.
        socket.create_connection((host, int(port)), timeout=self._timeout.total_seconds()).close()
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)

    def _serve(self) -> TCPStore:
        loopback = self._advertise == "localhost" or self._advertise.startswith("127.")
        listening = socket.create_server((self._advertise if loopback else "", 0), backlog=_BACKLOG)
        port = listening.getsockname()[1]
        return TCPStore(
            self._advertise,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listening.detach(),
        )
