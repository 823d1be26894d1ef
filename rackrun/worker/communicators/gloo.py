"""gloo's communicator of one group for one generation, which can be broken at any time.

``abort()``, ``shutdown()`` and ``destroy_process_group()`` wake no waiting thread (torch 2.13). ``shutdown(2)`` on the
*connected* TCP sockets does, within milliseconds, even when a peer is only stopped. The listening socket must stay
untouched: gloo reacts to its shutdown by ending the process. The last reference must go too, so that the peers notice.
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
"""Descriptors that `_duplicate` has open."""


class GlooCommunicator:
    """A `Communicator` on gloo. It finds its sockets by their ports: accepted ones have this rank's listening port, the
    others a peer's."""

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
        if not os.environ.get("TORCH_GLOO_LAZY_INIT"):  # all pairs are connected: refuse further callers
            for fd, inode in new:
                _take_no_more(fd, inode)
        told = store.multi_get([f"listening/{peer}" for peer in range(size)])
        theirs = [(str(address), int(port)) for ends in told for address, port in json.loads(ends)]
        self._mine = frozenset(port for _, port in mine)
        self._peers = frozenset(port for _, port in theirs)
        self._ends = frozenset(theirs)
        """Like `_peers`, with addresses, because another host may have a socket with the same port. Addresses that a
        network translates are not among them."""
        self._watched: dict[int, int] = {}

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:  # noqa: ARG002 - it is the same
        return getattr(self.inner, name)(*args)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        raise NotImplementedError("gloo's sends and receives do not wait for each other, and are called one by one")

    def is_over(self, work: dist.Work) -> bool:
        return work.is_completed()

    def watch(self) -> None:
        """Remember the connections, so that `lost_a_peer` works from now on."""
        for fd, inode in _sockets().items():
            with contextlib.suppress(OSError), _duplicate(fd) as connection:
                if self._is_ours(connection, inode) and (
                    connection.getsockname()[1] in self._mine or connection.getpeername()[:2] in self._ends
                ):
                    self._watched[fd] = inode

    def lost_a_peer(self) -> bool:
        """Whether a peer has closed its end. gloo closes a connection whose other end is closed; its descriptor is free
        then, or something else's."""
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
        """Do nothing: there is nothing to wait for."""

    def _shutdown_if_mine(self, fd: int, inode: int) -> None:
        with _duplicate(fd) as connection:
            if self._is_ours(connection, inode):
                connection.shutdown(socket.SHUT_RDWR)

    def _is_ours(self, connection: socket.socket, inode: int) -> bool:
        """Whether the descriptor still belongs to the same socket, and its ports to this communicator."""
        if os.fstat(connection.fileno()).st_ino != inode:  # closed meanwhile, and the descriptor reused
            return False
        if not _is_tcp(connection) or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return connection.getsockname()[1] in self._mine or connection.getpeername()[1] in self._peers


def _gloo_device() -> Any:
    """Return gloo's device on the interface that the user names (GLOO_SOCKET_IFNAME), or on the address by which other
    hosts know this one.

    torch's own choice is whatever this host's name resolves to: another address family than the job's, all interfaces,
    or nothing.
    """
    gloo = dist.ProcessGroupGloo
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip():
        return gloo.create_device(interface=interface)
    boot = current()
    if boot is not None and boot.advertise:
        # an address that is translated on the way; this host cannot listen on it
        with contextlib.suppress(RuntimeError):
            return gloo.create_device(hostname=boot.advertise)
    return gloo.create_default_device()


def _sockets() -> dict[int, int]:
    """Return descriptor -> inode of every socket of this process, except short-lived duplicates of `_duplicate`, whose
    closing would look like the loss of a peer."""
    found = {}
    with _duplicates_lock:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:[") and int(name) not in _duplicates:
                    found[int(name)] = int(target[8:-1])
    return found


def _take_no_more(fd: int, inode: int) -> None:
    """Make the kernel drop connections to a listening socket.

    gloo accepts every caller without any check, and ends the process when descriptors run out. Closing the socket would
    end the process, too.
    """
    with contextlib.suppress(OSError), _duplicate(fd) as listening:
        ours = os.fstat(listening.fileno()).st_ino == inode and _is_tcp(listening)
        if ours and listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            take_no_more(listening)


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


def _listening_end(fd: int) -> tuple[str, int] | None:
    """Return address and port of a listening TCP socket; None for any other descriptor."""
    with contextlib.suppress(OSError), _duplicate(fd) as candidate:
        if _is_tcp(candidate) and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            address, port = candidate.getsockname()[:2]
            return str(address), int(port)
    return None


@contextlib.contextmanager
def _duplicate(fd: int) -> Iterator[socket.socket]:
    """Context manager for a duplicate of the socket ``fd``. Raises `OSError` when it is closed or no socket any more,
    as another thread may close it and its number be reused."""
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
