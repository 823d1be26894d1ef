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
import os
import socket
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Communicator", "GlooCommunicator", "NcclCommunicator", "build_communicator"]

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Hangs are found by the agent, from observed step times; a collective itself need not give up."""

_build_lock = threading.Lock()  # finding gloo's sockets compares the descriptor table before and after


class Communicator(Protocol):
    """One generation's transport of one group."""

    inner: Any

    def break_(self) -> None:
        """End what is in flight. Any thread, any number of times; never blocks for long."""


def build_communicator(device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Blocks until all ``size`` ranks have come. Raises RuntimeError after ``timeout``: run it in a thread that may be left."""
    if device.type == "cuda":
        return NcclCommunicator(device, store, rank, size)
    return GlooCommunicator(store, rank, size, timeout)


class GlooCommunicator:
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        with _build_lock:
            before = _sockets()
            options._devices = [gloo.create_default_device()]
            self.inner: Any = gloo(store, rank, size, options)
            self._sockets = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        self.inner._set_default_timeout(COLLECTIVE_TIMEOUT)

    def break_(self) -> None:
        for fd, inode in list(self._sockets.items()):
            with contextlib.suppress(OSError):
                _shutdown_if_connected(fd, inode)


def _sockets() -> dict[int, int]:
    """Every socket of this process: descriptor -> inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _shutdown_if_connected(fd: int, inode: int) -> None:
    duplicate = os.dup(fd)
    if os.fstat(duplicate).st_ino != inode:  # closed meanwhile, and the number given to something else
        os.close(duplicate)
        return
    with socket.socket(fileno=duplicate) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)


class NcclCommunicator:
    """Not reachable without a GPU; the same rules (`docs/architecture.md`, section 5)."""

    def __init__(self, device: torch.device, store: dist.Store, rank: int, size: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # an abort must find no thread inside a blocking call
        self.inner: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self.inner.eager_connect_single_device(device)

    def break_(self) -> None:
        threading.Thread(target=self.inner.abort, name="rackrun-nccl-abort", daemon=True).start()
