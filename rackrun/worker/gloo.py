"""gloo's communicator of one group, for one generation.

``abort()``, ``shutdown()`` and ``destroy_process_group()`` wake nobody (torch 2.13). ``shutdown(2)`` on the *connected* TCP sockets does, within
milliseconds, also when a peer is only stopped. The listening socket must not be touched: gloo answers that by ending the process. The last reference
has to go too, so that the peers see it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rackrun.link.address import take_no_more
from rackrun.link.boot import current
from rackrun.worker.communicator import COLLECTIVE_TIMEOUT, PointToPoint

__all__ = ["GlooCommunicator"]

_listener_lock = threading.Lock()  # finding a device's listening socket compares the descriptor table before and after


class GlooCommunicator:
    """Its sockets are known by their ports: accepted ones have this rank's listening port, the others a peer's."""

    batches = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        with _listener_lock:
            before = _sockets()
            options._devices = [_gloo_device()]
            new = [(fd, inode) for fd, inode in _sockets().items() if before.get(fd) != inode]
            mine = [port for fd, _ in new if (port := _listening_port(fd))]
        store.set(f"listening/{rank}", ",".join(map(str, mine)))
        self.inner: Any = gloo(store, rank, size, options)
        self.inner._set_default_timeout(COLLECTIVE_TIMEOUT)
        self.host: Any = self.inner
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # all pairs are connected: nobody else has any business here
            for fd, inode in new:
                _take_no_more(fd, inode)
        told = store.multi_get([f"listening/{peer}" for peer in range(size)])
        self._mine = frozenset(mine)
        self._peers = frozenset(int(port) for ports in told for port in ports.decode().split(",") if port)

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:  # noqa: ARG002 - it is the same
        return getattr(self.inner, name)(*args)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        raise NotImplementedError("gloo's sends and receives do not wait for each other, and are called one by one")

    def break_(self) -> None:
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError):
                self._shutdown_if_mine(fd, inode)

    def drop(self) -> None:
        """Nothing to wait for."""

    def _shutdown_if_mine(self, fd: int, inode: int) -> None:
        duplicate = os.dup(fd)
        if os.fstat(duplicate).st_ino != inode:  # closed meanwhile, and the number given to something else
            os.close(duplicate)
            return
        with socket.socket(fileno=duplicate) as connection:
            if not _is_tcp(connection) or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return
            if connection.getsockname()[1] in self._mine or connection.getpeername()[1] in self._peers:
                connection.shutdown(socket.SHUT_RDWR)


def _gloo_device() -> Any:
    """On the interface that the user names (GLOO_SOCKET_IFNAME), else on the address that other hosts are told of this one. torch's own
    choice is what this host's name leads to: another family than the job's, all interfaces, or nothing."""
    gloo = dist.ProcessGroupGloo
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip():
        return gloo.create_device(interface=interface)
    boot = current()
    if boot is not None and boot.advertise:
        with contextlib.suppress(RuntimeError):  # an address that is translated on the way: it is not ours to listen on
            return gloo.create_device(hostname=boot.advertise)
    return gloo.create_default_device()


def _sockets() -> dict[int, int]:
    """Every socket of this process: descriptor -> inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _take_no_more(fd: int, inode: int) -> None:
    """Have the kernel drop what comes to a listening socket: gloo takes every caller in, without asking for anything, and ends the process
    when descriptors run short. Closing the socket would end it too."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listening:
        ours = os.fstat(listening.fileno()).st_ino == inode and _is_tcp(listening)
        if ours and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            take_no_more(listening)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def _listening_port(fd: int) -> int | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as candidate:
        if _is_tcp(candidate) and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(candidate.getsockname()[1])
    return None
