"""What moves bytes inside an elastic group, for one generation: gloo on CPUs, NCCL on GPUs, behind one seam.

A communicator is built, used, broken and dropped; it is never repaired. Breaking means that every collective in flight
on it ends, on this rank, with an error, at once:

* **gloo** (torch 2.13): ``abort()``, ``shutdown()`` and ``destroy_process_group()`` wake nobody. ``shutdown(2)`` on the
  *connected* TCP sockets does, within milliseconds, also when a peer is only stopped. The listening socket must not be
  touched: gloo answers that by ending the process. The last reference has to go too, so that the peers see it.
* **NCCL**: ``abort()``, on every survivor. Never ``destroy`` afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rackrun.link.address import host_and_port, take_no_more
from rackrun.link.boot import current
from rackrun.link.exchange import TCPSTORE_KEY

__all__ = ["COLLECTIVE_TIMEOUT", "Communicator", "GlooCommunicator", "NcclCommunicator", "build_communicator"]

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Hangs are found by the agent, from observed step times; a collective itself need not give up."""

_listener_lock = threading.Lock()  # finding a device's listening socket compares the descriptor table before and after


class Communicator(Protocol):
    """One generation's transport of one group."""

    inner: Any
    """Of the device's tensors."""
    host: Any
    """Of the host's, and of what the hosts alone have to agree on: the same where the device is the host."""

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        """A collective of the half that ``on_host`` says. RuntimeError where it is broken."""

    def break_(self) -> None:
        """End what is in flight. Any thread, any number of times; never blocks for long."""

    def drop(self) -> None:
        """Before the last reference goes: wait until breaking is over. May block."""


def build_communicator(
    device: torch.device, store: dist.Store, prefix: str, rank: int, size: int, timeout: timedelta
) -> Communicator:
    """Blocks until all ``size`` ranks have come. Raises RuntimeError after ``timeout``: run it in a thread that may be left."""
    if device.type == "cuda":
        host, port = host_and_port(store.get(TCPSTORE_KEY).decode())  # NCCL's own threads read it, long after
        real = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        on_host = GlooCommunicator(store, rank, size, timeout)
        return NcclCommunicator(device, dist.PrefixStore(prefix, real), rank, size, on_host)
    return GlooCommunicator(store, rank, size, timeout)


class GlooCommunicator:
    """Its sockets are known by their ports: accepted ones have this rank's listening port, the others a peer's."""

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


class NcclCommunicator:
    """NCCL for the device's tensors, gloo for the host's. A break ends the hosts' half first: what they agree on, such as a gate, must not pass
    behind a collective that was left in the middle."""

    def __init__(self, device: torch.device, store: dist.Store, rank: int, size: int, host: GlooCommunicator) -> None:
        torch.cuda.set_device(device)  # of this thread: else it would make a context on the first GPU
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        options.config.blocking = 0  # an abort must find no thread inside a blocking call
        self.inner: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self.inner.eager_connect_single_device(device)
        self.host: Any = host.inner
        self._gloo, self._device = host, device
        self._enqueue = threading.Lock()
        self._broken = False
        self._revoke = self._when_ready()
        self._abort = threading.Thread(target=self._end, name="rackrun-nccl-abort", daemon=True)
        self._once = threading.Lock()

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        if on_host:
            return getattr(self.host, name)(*args)
        with self._enqueue:  # NCCL forbids an abort beside another call
            if self._broken:
                raise RuntimeError("the communicator was broken")
            return getattr(self.inner, name)(*args)

    def break_(self) -> None:
        self._gloo.break_()
        if self._once.acquire(blocking=False):
            self._abort.start()

    def drop(self) -> None:
        if not self._once.acquire(blocking=False):
            self._abort.join()

    def _when_ready(self) -> Callable[[], bool]:
        """Wait for the communicator, which is not there when its constructor returns: before that nothing could break it. Returns what stops its
        kernels without freeing anything, and tells whether it has."""
        if not hasattr(self.inner, "_comm_ptr"):
            return _cannot
        address = self.inner._comm_ptr()
        revoke = _loaded_nccl("ncclCommRevoke")
        return _cannot if revoke is None else lambda: revoke(ctypes.c_void_p(address), 0) in _NCCL_DONE

    def _end(self) -> None:
        torch.cuda.set_device(self._device)
        entered = self._enqueue.acquire(timeout=_ENQUEUE_S)  # whoever is inside for longer may never come out
        self._broken = True
        try:
            self._revoke()
            self.inner.abort()
        finally:
            if entered:
                self._enqueue.release()


_ENQUEUE_S = 0.5
_NCCL_DONE = (0, 7)
"""ncclSuccess, ncclInProgress."""


def _cannot() -> bool:
    return False


def _loaded_nccl(function: str) -> Any:
    """Of the library that torch has loaded; None: it has no such function (``ncclCommRevoke`` came with 2.28.7)."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libnccl" in line}
    return getattr(ctypes.CDLL(min(paths)), function, None) if paths else None
