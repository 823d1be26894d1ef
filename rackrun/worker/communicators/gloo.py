"""gloo's communicator of one group, for one generation.

``abort()``, ``shutdown()`` and ``destroy_process_group()`` wake nobody (torch 2.13). ``shutdown(2)`` on the *connected* TCP sockets does, within
milliseconds, also when a peer is only stopped. The listening socket must not be touched: gloo answers that by ending the process. The last reference
has to go too, so that the peers see it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rackrun.link.address import take_no_more
from rackrun.protocol.boot import current
from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT, PointToPoint

__all__ = ["GlooCommunicator"]

_listener_lock = threading.Lock()  # finding a device's listening socket compares the descriptor table before and after
_duplicates_lock = threading.Lock()
_duplicates: set[int] = set()
"""Descriptors of `_duplicate`."""


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
            mine = [end for fd, _ in new if (end := _listening_end(fd))]
        store.set(f"listening/{rank}", json.dumps(mine))
        self.inner: Any = gloo(store, rank, size, options)
        self.inner._set_default_timeout(COLLECTIVE_TIMEOUT)
        self.host: Any = self.inner
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # all pairs are connected: nobody else has any business here
            for fd, inode in new:
                _take_no_more(fd, inode)
        told = store.multi_get([f"listening/{peer}" for peer in range(size)])
        theirs = [(str(address), int(port)) for ends in told for address, port in json.loads(ends)]
        self._mine = frozenset(port for _, port in mine)
        self._peers = frozenset(port for _, port in theirs)
        self._ends = frozenset(theirs)
        """As `_peers`, with the addresses: another host may have another socket with one of those ports. What a network translates is not among them."""
        self._watched: dict[int, int] = {}

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:  # noqa: ARG002 - it is the same
        return getattr(self.inner, name)(*args)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        raise NotImplementedError("gloo's sends and receives do not wait for each other, and are called one by one")

    def is_over(self, work: dist.Work) -> bool:
        return work.is_completed()

    def watch(self) -> None:
        """From now on `lost_a_peer` can tell."""
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                if self._is_ours(connection, inode) and (
                    connection.getsockname()[1] in self._mine or connection.getpeername()[:2] in self._ends
                ):
                    self._watched[fd] = inode

    def lost_a_peer(self) -> bool:
        """gloo itself closes a connection whose other end is closed: its number is free then, or something else's."""
        poll = select.poll()
        for fd, inode in self._watched.items():
            try:
                if os.fstat(fd).st_ino != inode:
                    return True
            except OSError:
                return True
            poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    def break_(self) -> None:
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError):
                self._shutdown_if_mine(fd, inode)

    def drop(self) -> None:
        """Nothing to wait for."""

    def _shutdown_if_mine(self, fd: int, inode: int) -> None:
        with _duplicate(fd) as connection:
            if self._is_ours(connection, inode):
                connection.shutdown(socket.SHUT_RDWR)

    def _is_ours(self, connection: socket.socket, inode: int) -> bool:
        """It is still that one, and by its ports one of this communicator's."""
        if os.fstat(connection.fileno()).st_ino != inode:  # closed meanwhile, and the number given to something else
            return False
        if not _is_tcp(connection) or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return connection.getsockname()[1] in self._mine or connection.getpeername()[1] in self._peers


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
    """Every socket of this process: descriptor -> inode. Not what another thread has for a moment to look at one: who watched that would take
    its end for that of a peer."""
    found = {}
    with _duplicates_lock:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:[") and int(name) not in _duplicates:
                    found[int(name)] = int(target[8:-1])
    return found


def _take_no_more(fd: int, inode: int) -> None:
    """Have the kernel drop what comes to a listening socket: gloo takes every caller in, without asking for anything, and ends the process
    when descriptors run short. Closing the socket would end it too."""
    with contextlib.suppress(OSError), _duplicate(fd) as listening:
        ours = os.fstat(listening.fileno()).st_ino == inode and _is_tcp(listening)
        if ours and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            take_no_more(listening)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def _listening_end(fd: int) -> tuple[str, int] | None:
    """Its address and port."""
    with contextlib.suppress(OSError), _duplicate(fd) as candidate:
        if _is_tcp(candidate) and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address, port = candidate.getsockname()[:2]
            return str(address), int(port)
    return None


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    """OSError when it is closed, or no socket any more: another thread may close it, and its number be given to something else."""
    with _duplicates_lock:
        number = os.dup(fd)
        _duplicates.add(number)
    try:
        duplicate = socket.socket(fileno=number)
        try:
            yield duplicate
        finally:
            duplicate.detach()
    finally:
        with _duplicates_lock:
            os.close(number)
            _duplicates.discard(number)
