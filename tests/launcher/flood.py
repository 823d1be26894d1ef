"""Callers that no job knows, at all its doors: for tests, and for `benchmarks/flood.py`."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sqlite3
import threading
from pathlib import Path

import psutil

__all__ = ["Flood", "listening", "torchs_stores"]


class Flood:
    """Callers without a token, at every port on which a process of a job listens, as many as there may be, again and again."""

    def __init__(self, ports: list[int], each: int) -> None:
        self.calls = 0
        self._ports, self._each = ports, each
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for port in self._ports:
            for number in range(self._each):
                self._call(selector, port, number)
        while not self._over.is_set():
            for key, _ in selector.select(0.05):
                port, number = key.data
                with contextlib.suppress(OSError):
                    if key.events & selectors.EVENT_WRITE:  # connected
                        if number % 3 == 1:
                            key.fileobj.send(b"\xff" * 100_000)  # type: ignore[union-attr]
                        elif number % 3 == 2:
                            key.fileobj.send(b"G")  # type: ignore[union-attr]
                        selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                        continue
                    if key.fileobj.recv(4096):  # type: ignore[union-attr]
                        continue
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                self._call(selector, port, number)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        selector.close()

    def _call(self, selector: selectors.BaseSelector, port: int, number: int) -> None:
        caller = socket.socket()
        caller.setblocking(False)
        caller.connect_ex(("127.0.0.1", port))
        selector.register(caller, selectors.EVENT_WRITE, (port, number))
        self.calls += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def listening(pids: list[int]) -> dict[int, set[str]]:
    """Port -> addresses that these processes listen on."""
    found: dict[int, set[str]] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(pid).net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.setdefault(one.laddr.port, set()).add(one.laddr.ip)
    return found


def torchs_stores(out_dir: Path, pids: list[int]) -> list[int]:
    """Ports of the agent that are neither its exchange nor its snapshots: TCPStores, which take in whoever comes, in torch's own threads."""
    connection = sqlite3.connect(out_dir / "journal.sqlite")
    try:
        ((body,),) = connection.execute("SELECT body FROM events WHERE name = 'TrayJoined'").fetchall()
    finally:
        connection.close()
    known = {int(json.loads(body)[name].rpartition(":")[2]) for name in ("store", "snapshots")}
    (agent,) = [pid for pid in pids if known <= set(listening([pid]))]
    return sorted(set(listening([agent])) - known)
