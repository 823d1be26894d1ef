"""NCCL for a device's tensors and gloo for the host's, as one communicator. It has two classes, because torch has two
backends for NCCL.

`LegacyNccl` uses ``ProcessGroupNCCL``, the only backend that can be broken at any time in torch 2.10 to 2.14. `Nccl2`
uses ``ProcessGroupNCCL2``, the default from torch 2.15 on, in its reconfigurable mode, in which torch's watchdog ends
no process and an abort revokes.

Both keep these rules:

* The communicator is ready when its constructor returns. Before that nothing could break it, so the constructor runs in
a thread that may be abandoned.
* A break stops the hosts' backend first. What the hosts agree on, such as a gate, must not pass after a collective that
was left in the middle. Not only this rank has garbage then: a kernel that exits goes on counting up the steps that its
peers wait for, and theirs end without an error, with whatever is in their buffers (``postPeer`` in NCCL's
``prims_simple.h``). The peers can see that this rank's connections are closed.
* A break first *revokes*: kernels exit within milliseconds, and nothing is freed. Memory is freed when no thread is
inside a call any more, because NCCL forbids that during a call. Source: NCCL's user guide on ``ncclCommAbort`` and
``ncclCommRevoke``.
* The unique ids travel over the group's own store, which is closed once the group is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rackrun.checkpoint.host_memory.device_threads import use_device
from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library
from rackrun.worker.communicators.communicator import COLLECTIVE_TIMEOUT, PointToPoint
from rackrun.worker.communicators.gloo import GlooCommunicator

__all__ = ["LegacyNccl", "Nccl2", "nccl_communicator"]

_BACKEND = "RACKRUN_NCCL_BACKEND"
_ENQUEUE_S = 0.2
"""How long, in seconds, a break waits for a thread that is inside a call. One that stays longer returns only when the
communicator is revoked."""
_LEAVE_S = 5.0
"""How long, in seconds, a break then waits for that thread before the memory is freed anyway."""
_FREED_S = 30.0
"""How long, in seconds, `drop` waits for the memory. NCCL frees it when the device has passed what was enqueued; a
device that never does ends its rank (`rackrun.worker.device.device_return`). An abort that hangs for another reason
delays neither the next generation nor the end of the process."""
_NCCL_DONE = (0, 7)
"""``ncclSuccess`` and ``ncclInProgress``."""


def nccl_communicator(
    device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta, host: GlooCommunicator
) -> _Nccl:
    """Build the NCCL communicator of one group.

    ``store`` must belong to this group alone. ``host``: its gloo communicator, for tensors of the host.
    RACKRUN_NCCL_BACKEND selects torch's class: "legacy" (``ProcessGroupNCCL``) or "nccl2" (``ProcessGroupNCCL2``, the
    default where its start can be bounded, from torch 2.15 on). Raises `RuntimeError` after ``timeout``, or for another
    value.
    """
    kind = os.environ.get(_BACKEND) or ("nccl2" if _has_bounded_nccl2() else "legacy")
    if kind not in ("legacy", "nccl2"):
        raise RuntimeError(f"{_BACKEND} is {kind!r}; it can be 'legacy' or 'nccl2'")
    use_device(device)
    within = dist.PrefixStore("nccl", store)
    return (Nccl2 if kind == "nccl2" else LegacyNccl)(device, within, rank, size, timeout, host)


def _has_bounded_nccl2() -> bool:
    """Whether ``ProcessGroupNCCL2`` is usable. Before torch 2.15 its initialisation in reconfigurable mode blocks
    without a limit; 2.15 also added access to the communicator."""
    return hasattr(getattr(dist, "ProcessGroupNCCL2", None), "_comm_ptr")


class _Nccl(ABC):
    """The part that does not depend on the backend: calls, and how they end."""

    batches = True
    inner: Any = None

    def __init__(
        self,
        device: torch.device,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        host: GlooCommunicator,
    ) -> None:
        self.host: Any = host.inner
        self._gloo, self._device = host, device
        self._store = store  # torch holds a reference, too, but not to its Python part
        self._enqueue = threading.Lock()
        self._broken = False
        self._once = threading.Lock()
        self._ending = threading.Thread(target=self._end, name="rackrun-nccl-end", daemon=True)
        host.watch()
        try:
            self._build(store, rank, size, timeout)
        except BaseException:
            self.break_()  # nobody receives this object, and the next must not wait for the device memory that it holds
            raise

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        if on_host:
            return getattr(self.host, name)(*args)
        with self._enqueue:
            self._check_whole()
            return getattr(self.inner, name)(*args)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        with self._enqueue:
            self._check_whole()
            self.inner._start_coalescing()
            try:
                for name, tensor, peer, tag in operations:
                    getattr(self.inner, name)([tensor], peer, tag)
            finally:
                work = self.inner._end_coalescing()
        return work

    def is_over(self, work: dist.Work) -> bool:
        """Whether ``work`` has ended; False during an abort.

        torch holds Python's lock while it answers, and an abort holds torch's lock while it waits for the device.
        Asking during an abort would stop all threads of this process, and the heartbeat with them.
        """
        if not self._enqueue.acquire(blocking=False):
            return False
        try:
            return not self._broken and work.is_completed()
        finally:
            self._enqueue.release()

    def lost_a_peer(self) -> bool:
        return self._gloo.lost_a_peer()

    def break_(self) -> None:
        self._gloo.break_()
        if self._once.acquire(blocking=False):
            self._ending.start()

    def drop(self) -> None:
        self.break_()
        self._ending.join(_FREED_S)

    def _check_whole(self) -> None:
        if self._broken:
            raise RuntimeError("the communicator was broken")

    def _end(self) -> None:
        """End the communicator. Later calls are refused without a wait, as NCCL frees only when the device has passed
        what was enqueued."""
        with contextlib.suppress(RuntimeError):  # if the device has failed, its communicator is ended anyway
            use_device(self._device)
        nobody_inside = self._enqueue.acquire(timeout=_ENQUEUE_S)
        self._broken = True
        if nobody_inside:
            self._enqueue.release()
        if self.inner is None:  # the build had failed
            return
        lets_go = False
        with contextlib.suppress(RuntimeError):
            lets_go = self._stop()
        if lets_go and not nobody_inside and self._enqueue.acquire(timeout=_LEAVE_S):
            self._enqueue.release()
        with contextlib.suppress(RuntimeError):  # raised by a communicator that has failed already
            self._free()

    @abstractmethod
    def _build(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Set `inner`, and return when it is ready. Raises `RuntimeError`."""

    @abstractmethod
    def _stop(self) -> bool:
        """End what is in flight without freeing anything. Returns False if that is impossible."""

    @abstractmethod
    def _free(self) -> None:
        """Free the communicator's memory. No thread is inside a call any more."""


class LegacyNccl(_Nccl):
    """``ProcessGroupNCCL`` in NCCL's blocking mode.

    In the non-blocking mode each call starts a thread of NCCL. A thread that asks for errors meanwhile (torch's
    watchdog, and every ``is_completed``) finishes that thread's job at the same time as the caller, who does so, too.
    ``ncclCommGetAsyncError`` then frees one job twice (``ncclGroupJobComplete`` in NCCL's ``group.cc``, 2.28 to 2.30).
    """

    def _build(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        options.config.blocking = 1
        self._revoke: Callable[[], bool] = _cannot
        self._left = False
        self.inner = dist.ProcessGroupNCCL(store, rank, size, options)
        self._connect_within(timeout)
        if not hasattr(self.inner, "_comm_ptr"):
            return
        address = self.inner._comm_ptr()
        revoke = _loaded_nccl("ncclCommRevoke")
        if revoke is not None:
            self._revoke = lambda: revoke(ctypes.c_void_p(address), 0) in _NCCL_DONE

    def _connect_within(self, timeout: timedelta) -> None:
        """Connect within ``timeout``, or raise `RuntimeError`. A connect in progress cannot be ended, only abandoned;
        it ends when a peer's sockets are closed, at the latest when that peer's process ends."""
        failed: list[BaseException] = []

        def connect() -> None:
            try:
                use_device(self._device)
                self.inner.eager_connect_single_device(self._device)
                self._wait_ready()
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                failed.append(error)
            if self._left:
                with contextlib.suppress(RuntimeError):
                    self.inner.abort()

        thread = threading.Thread(target=connect, name="rackrun-nccl-connect", daemon=True)
        thread.start()
        thread.join(timeout.total_seconds())
        if thread.is_alive():
            self._left = True
            raise RuntimeError(f"NCCL has not connected this rank to the others within {timeout.total_seconds():g} s")
        if failed:
            raise failed[0]

    def _wait_ready(self) -> None:
        """Wait until the communicator is ready, by a collective of nothing, which launches no kernel.

        ``_comm_ptr`` waits as well, but holds Python's lock meanwhile (torch 2.9 to 2.15). The control thread would
        learn of no break, and the builders of other groups, whose stores need that lock, would not proceed while a peer
        waits for them. A stream of its own keeps other work from coming after it.
        """
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            self.inner.allreduce([torch.empty(0, device=self._device)])

    def _stop(self) -> bool:
        return self._revoke()

    def _free(self) -> None:
        self.inner.abort()


class Nccl2(_Nccl):
    def _build(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        from torch._C._distributed_c10d import ReconfigureOptions  # type: ignore[attr-defined] # not in every torch

        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        options.enable_reconfigure = True
        self.inner = dist.ProcessGroupNCCL2(store, rank, size, options)  # type: ignore[attr-defined]
        mine = self.inner.get_reconfigure_handle()
        if rank == 0:
            store.set("first", mine)
        wanted: Any = ReconfigureOptions()
        wanted.uuid = 1  # the store belongs to this communicator alone
        wanted.handles = reconfigure_handles(mine, rank, size, lambda: store.get("first").decode())
        wanted.timeout = timeout
        self.inner.reconfigure(wanted)

    def _stop(self) -> bool:
        self.inner.abort()
        return True

    def _free(self) -> None:
        self.inner.shutdown()


def reconfigure_handles(mine: str, rank: int, size: int, first: Callable[[], str]) -> list[str]:
    """Return a handle for each rank of a new communicator, in rank order.

    torch looks for this rank's own handle to learn its rank, and derives the key of the unique id from the first; those
    two are real. The others only have to parse and to differ. Source: torch's ``ReconfigureNCCL.cpp``.
    """
    backend, _, rest = mine.partition(":")
    after_rank = rest.partition(":")[2]
    handles = [f"{backend}:{peer}:{after_rank}" for peer in range(size)]
    handles[0] = mine if rank == 0 else first()
    handles[rank] = mine
    return handles


def _cannot() -> bool:
    return False


def _loaded_nccl(function: str) -> Any:
    """Return a function of the NCCL library that torch has loaded; None if it lacks that function (``ncclCommRevoke``
    came with NCCL 2.28.7)."""
    return getattr(loaded_library("libnccl"), function, None)
