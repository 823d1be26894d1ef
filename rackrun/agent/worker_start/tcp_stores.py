"""TCPStores through which plain scripts meet: a new one for each restart.

A plain script's ``init_process_group("env://")`` uses the store at MASTER_ADDR:MASTER_PORT without a prefix, so the
keys of two attempts would collide. For each generation, the first tray that starts a worker in it claims it on the
job's exchange (`rackrun.link.exchange`), creates a new store and publishes its address, which the others read.
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

__all__ = ["TcpStores", "StoreUnreachable"]

_KEPT_GENERATIONS = 2
_SILENT_S = 600
"""Seconds for which the kernel holds back a connection without data. torch's clients send first."""


class StoreUnreachable(Exception):
    """The job's store did not answer in time."""


class TcpStores:
    """Hosts stores. `master` may be called from any thread; it blocks for up to ``timeout_s`` seconds."""

    def __init__(self, advertise: str, tray: str, token: str, timeout_s: float = 30.0) -> None:
        self._advertise, self._tray, self._token = advertise, tray, token
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._masters: dict[int, tuple[str, TCPStore | None]] = {}  # by generation; the store if hosted here

    def master(self, exchange: str, generation: int) -> str:
        """Return ``host:port`` of the store of ``generation``, found through the job's exchange. Raises
        StoreUnreachable."""
        with self._lock:
            if generation not in self._masters:
                self._masters[generation] = self._find(exchange, generation)
                for old in [g for g in self._masters if g <= generation - _KEPT_GENERATIONS]:
                    del self._masters[old]
            return self._masters[generation][0]

    async def master_soon(self, exchange: str, generation: int) -> str:
        """Call `master` in a thread of its own, which need not be waited for if the job ends."""
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
        """Return a new server, which lives as long as this object.

        It listens only on the announced address. It requires no token, which torch's clients could not send, but the
        kernel holds back connections without data.
        """
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
