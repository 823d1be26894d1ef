"""Where the kit reaches into rackrun, all in one place: what moves there is changed here."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from benchmarks.gpu.raw_nccl import RawNccl
from rackrun.checkpoint.host_memory import host_registration, loaded_libraries
from rackrun.link import exchange
from rackrun.worker.communicators import nccl
from rackrun.worker.communicators.nccl_environment import prepare_environment
from rackrun.worker.loop import unit_runner
from rackrun.worker.membership import communicator_builder, worker_membership
from rackrun.worker.restore import restore_transfer

__all__ = [
    "as_they_are",
    "asynchronous",
    "communicator",
    "gathering",
    "leave_spares_cold",
    "play_runtime",
    "prepare",
    "quiet_after",
    "raw_nccl",
    "when_giving",
    "when_nccl_builds",
]

HANDSHAKE = timedelta(seconds=20)
_NAP_S = 0.0005


def prepare() -> None:
    """What a worker does before its first group."""
    prepare_environment()


def communicator(address: str, name: str, rank: int, size: int, device: torch.device) -> Any:
    """One that workers of a generation would build, between ``size`` processes that call this with one ``name``. ``address``: of a TCPStore that
    outlives them. Blocks until all have come, or raises RuntimeError."""
    host, _, port = address.rpartition(":")
    store = dist.PrefixStore(name, dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    given: dict[str, Any] = {"device": device, "store": store, "rank": rank, "size": size, "timeout": HANDSHAKE}
    if hasattr(exchange, "TCPSTORE_KEY"):  # where NCCL needs a store of torch's own
        store.set(exchange.TCPSTORE_KEY, address)
    if "prefix" in inspect.signature(communicator_builder.build_communicator).parameters:
        given["prefix"] = f"kit/{name}"
    return communicator_builder.build_communicator(**given)


def asynchronous() -> dist.AllreduceOptions:
    """Of a sum that is enqueued."""
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def gathering() -> Any:
    """Options of a gather that is enqueued."""
    options: Any = AllgatherOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def as_they_are(values: torch.Tensor) -> torch.Tensor:
    """On the host. In a dry run, as the host's memory is: the double's stream is not waited for."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().copy())
    return values.cpu()


def play_runtime(runtime: Any) -> None:
    """``runtime`` in the place of CUDA's, whose last error a failed registration has to take."""
    for name in ("_loaded_runtime", "loaded_runtime"):
        if hasattr(host_registration, name):
            setattr(host_registration, name, lambda: runtime)
    if hasattr(host_registration, "loaded_library"):
        host_registration.loaded_library = lambda _: runtime


def leave_spares_cold() -> None:
    """A spare of this process makes its first communicator of NCCL when it is needed."""
    unit_runner.warm_nccl = lambda *_: None  # type: ignore[attr-defined]  # its import, replaced


def when_nccl_builds(call: Callable[[], None]) -> None:
    """``call`` is called in this process when the hosts' half of a communicator is there, and NCCL's is about to be built."""
    for kind in (nccl.LegacyNccl, nccl.Nccl2):
        build = kind._build

        def told(*given: Any, build: Any = build, **more: Any) -> None:
            call()
            build(*given, **more)

        kind._build = told  # type: ignore[method-assign]


def when_giving(call: Callable[[], None]) -> None:
    """``call`` is called in this process when it is the source of a restore, between two pieces of what it gives."""
    give = restore_transfer.SendBuffers.piece
    given = 0

    def told(self: Any, piece: Any) -> torch.Tensor:
        nonlocal given
        given += 1
        if given > 1:
            call()
        return give(self, piece)

    restore_transfer.SendBuffers.piece = told  # type: ignore[method-assign]


def raw_nccl() -> RawNccl:
    """RuntimeError where torch has NCCL within itself."""
    library = loaded_libraries.loaded_library("libnccl")
    if library is None:
        raise RuntimeError("torch has loaded no libnccl")
    return RawNccl(library)


def quiet_after(device: torch.device, limit_s: float, *, stop: Callable[[], bool] = lambda: False) -> float | None:
    """Seconds until the device has done all that this thread has enqueued. None: it has not, after ``limit_s``. Nothing blocks on the device."""
    queue = worker_membership.queue_of(device)  # type: ignore[attr-defined]  # which the double of NCCL replaces
    passed, began = queue.mark(), time.monotonic()
    while not passed():
        if time.monotonic() - began > limit_s or stop():
            return None
        time.sleep(_NAP_S)
    return time.monotonic() - began
