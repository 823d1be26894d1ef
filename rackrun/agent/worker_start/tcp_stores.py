"""The TCPStores that plain scripts meet over: a fresh one for each restart.

A plain script's ``init_process_group("env://")`` uses the store at MASTER_ADDR:MASTER_PORT without any prefix, so the keys
of two attempts would collide. For each generation the first tray that starts a worker in it claims it on the job's
exchange (`rackrun.link.exchange`), makes a new store and says where; the others read that.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import threading

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, which has no type
from torch.distributed import DistError

from rackrun.link.address import join, listen_on
from rackrun.link.exchange import Exchange

__all__ = ["Stores", "StoreUnreachable"]

_KEPT_GENERATIONS = 2
_SILENT_S = 600
"""Who connects and says nothing is not taken in for about so long; torch's clients speak first."""


class StoreUnreachable(Exception):
    """The job's store did not answer in time."""


class Stores:
    """Hosts servers. `master` may be called from any thread; it blocks for up to ``timeout_s``."""

    def __init__(self, advertise: str, tray: str, token: str, timeout_s: float = 30.0) -> None:
        self._advertise, self._tray, self._token = advertise, tray, token
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._masters: dict[int, tuple[str, TCPStore | None]] = {}  # generation -> where, and ours if we host it

    def master(self, exchange: str, generation: int) -> str:
        """``host:port`` of the store that is fresh in ``generation``, by way of the job's exchange. Raises StoreUnreachable."""
        with self._lock:
            if generation not in self._masters:
                self._masters[generation] = self._find(exchange, generation)
                for old in [g for g in self._masters if g <= generation - _KEPT_GENERATIONS]:
                    del self._masters[old]
            return self._masters[generation][0]

    async def master_soon(self, exchange: str, generation: int) -> str:
        """`master` in a thread of its own, one that nobody has to wait for when the job ends meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def ask() -> None:
            try:
                found, error = self.master(exchange, generation), None
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
            self._lock.release()

    def _find(self, address: str, generation: int) -> tuple[str, TCPStore | None]:
        try:
            exchange = Exchange(address, self._token, f"master/{generation}", self._timeout_s)
            try:
                exchange.set("claim", self._tray.encode())
                if exchange.get("claim", self._timeout_s).decode() != self._tray:
                    return exchange.get("address", self._timeout_s).decode(), None
                server = self.serve()
                where = join(self._advertise, server.port)
                exchange.set("address", where.encode())
                return where, server
            finally:
                exchange.close()
        except (DistError, RuntimeError, OSError, ValueError) as error:
            raise StoreUnreachable(f"no store for generation {generation} by way of {address}: {error}") from error

    def serve(self) -> TCPStore:
        """A new server, which lives as long as what is returned. It listens where others are told, and nowhere else; it asks nobody for
        a token, which no client of torch's could show, but the kernel keeps who says nothing."""
        listening = listen_on(self._advertise)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)
        port = listening.getsockname()[1]
        return TCPStore(
            self._advertise,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=self._timeout_s),
            master_listen_fd=listening.detach(),
        )
