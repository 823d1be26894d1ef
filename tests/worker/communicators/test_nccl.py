"""NCCL's communicators, with torch's groups played by others: in which order things are asked of them, and from which thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.communicators import nccl
from rackrun.worker.communicators.nccl import LegacyNccl, Nccl2, nccl_communicator, reconfigure_handles

DEVICE = torch.device("cuda", 0)
SOON = timedelta(seconds=20)


class Backend:
    """One of torch's groups. ``said`` has what it was asked, in order."""

    def __init__(self, said: list[str], store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.said, self.rank, self.size, self.options = said, rank, size, options
        self.store = store
        self.inside, self.lets_go = threading.Event(), threading.Event()
        self.lets_go.set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.said.append(f"connect {device}")

    def _comm_ptr(self) -> int:
        self.said.append("address")
        return 4711

    def get_reconfigure_handle(self) -> str:
        return f"nccl2:{self.rank}:-1:{id(self)}:"

    def reconfigure(self, wanted: Any) -> None:
        self.said.append("reconfigure")
        self.wanted = wanted

    def allreduce(self, tensors: Any, *_: Any) -> str:
        del tensors
        self.inside.set()
        self.lets_go.wait()
        self.said.append("allreduce")
        return "a work"

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        del tensors
        self.said.append(f"send to {peer}, {tag}")

    def recv(self, tensors: Any, peer: int, tag: int) -> None:
        del tensors
        if peer == 99:
            raise ValueError("no such rank")
        self.said.append(f"receive from {peer}, {tag}")

    def _start_coalescing(self) -> None:
        self.said.append("start")

    def _end_coalescing(self) -> str:
        self.said.append("end")
        return "one work"

    def abort(self) -> None:
        self.said.append("abort")

    def shutdown(self) -> None:
        self.said.append("shutdown")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def make(*args: Any) -> Backend:
        return Backend(found, *args)

    def options() -> Any:
        return SimpleNamespace(config=SimpleNamespace(blocking=1), _timeout=None)

    make.Options = options  # type: ignore[attr-defined]
    make._comm_ptr = None  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", make, raising=False)
    monkeypatch.setattr(torch._C._distributed_c10d, "ReconfigureOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", functools.partial(_on_host, torch.empty))

    def revoke(address: Any, flags: int) -> int:
        found.append(f"revoke {address.value} {flags}")
        return 7

    monkeypatch.setattr(nccl, "_loaded_nccl", {"ncclCommRevoke": revoke}.get)
    monkeypatch.delenv("RACKRUN_NCCL_BACKEND", raising=False)
    return found


def _on_host(make: Callable[..., torch.Tensor], *size: int, device: torch.device) -> torch.Tensor:
    del device
    return make(*size)


class Host:
    """gloo's half."""

    def __init__(self, said: list[str]) -> None:
        self._said = said
        self.inner = SimpleNamespace(allreduce=lambda *_: "the hosts' work")

    def watch(self) -> None:
        """Nobody leaves."""

    def break_(self) -> None:
        self._said.append("break the hosts'")


def made(kind: str, said: list[str], monkeypatch: pytest.MonkeyPatch, within: timedelta = SOON) -> Any:
    monkeypatch.setenv("RACKRUN_NCCL_BACKEND", kind)
    host: Any = Host(said)
    return nccl_communicator(DEVICE, dist.HashStore(), 0, 2, within, host)


def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that are started from here on."""
    threads: list[threading.Thread] = []
    begin = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        threads.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return threads


KINDS = pytest.mark.parametrize(
    ("kind", "stop", "free"), [("legacy", "revoke 4711 0", "abort"), ("nccl2", "abort", "shutdown")]
)


def test_it_is_ready_when_it_is_made(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocking mode: in the other, NCCL's own answer to whether there are errors is not safe beside a call. The address is asked for when it is
    ready, as torch would wait with Python's lock held."""
    legacy = made("legacy", said, monkeypatch)
    assert said == ["connect cuda:0", "allreduce", "address"]
    assert legacy.inner.options.config.blocking == 1
    said.clear()
    newer = made("nccl2", said, monkeypatch)
    assert said == ["reconfigure"]
    assert newer.inner.options.enable_reconfigure
    assert newer.inner.wanted.timeout == SOON


def test_the_default_is_nccl2_where_its_initialisation_is_bounded(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = Host(said)
    assert isinstance(nccl_communicator(DEVICE, dist.HashStore(), 0, 2, SOON, host), Nccl2)
    monkeypatch.delattr(dist.ProcessGroupNCCL2, "_comm_ptr")  # type: ignore[attr-defined]
    assert isinstance(nccl_communicator(DEVICE, dist.HashStore(), 0, 2, SOON, host), LegacyNccl)
    monkeypatch.setenv("RACKRUN_NCCL_BACKEND", "nccl3")
    with pytest.raises(RuntimeError, match="legacy"):
        nccl_communicator(DEVICE, dist.HashStore(), 0, 2, SOON, host)


@KINDS
def test_a_break_stops_the_hosts_half_then_kernels_and_then_frees(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = made(kind, said, monkeypatch)
    said.clear()
    communicator.break_()
    communicator.break_()
    communicator.drop()
    assert [one for one in said if one != "break the hosts'"] == [stop, free]
    assert said[0] == "break the hosts'"
    with pytest.raises(RuntimeError, match="broken"):
        communicator.call("allreduce", [])
    with pytest.raises(RuntimeError, match="broken"):
        communicator.batch([])
    assert communicator.call("allreduce", [], on_host=True) == "the hosts' work", "it fails by itself"


@KINDS
def test_what_is_inside_a_call_is_revoked_and_nothing_is_freed_beside_it(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL forbids an abort beside another call; a revoke lets out who is held inside."""
    monkeypatch.setattr(nccl, "_ENQUEUE_S", 0.01)
    communicator = made(kind, said, monkeypatch)
    backend = communicator.inner
    backend.lets_go.clear()
    said.clear()
    revoked = threading.Event()
    stops = communicator._stop

    def stop_and_let_go() -> bool:
        stopped = stops()
        revoked.set()
        backend.lets_go.set()
        return bool(stopped)

    communicator._stop = stop_and_let_go
    caller = threading.Thread(target=communicator.call, args=["allreduce", []])
    caller.start()
    backend.inside.wait()
    communicator.break_()
    revoked.wait()
    communicator.drop()
    caller.join()
    assert [one for one in said if one != "break the hosts'"] == [stop, "allreduce", free]


@KINDS
def test_whoever_drops_what_nobody_has_broken_frees_it(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = made(kind, said, monkeypatch)
    said.clear()
    communicator.drop()
    assert said[-2:] == [stop, free]


@KINDS
def test_sends_and_receives_of_a_batch_are_one_call(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del stop, free
    communicator = made(kind, said, monkeypatch)
    said.clear()
    tensor = torch.ones(1)
    assert communicator.batch([("send", tensor, 1, 3), ("recv", tensor, 1, 4)]) == "one work"
    assert said == ["start", "send to 1, 3", "receive from 1, 4", "end"]
    said.clear()
    with pytest.raises(ValueError, match="no such rank"):
        communicator.batch([("send", tensor, 1, 3), ("recv", tensor, 99, 4)])
    assert said == ["start", "send to 1, 3", "end"], "else every later call would belong to the batch"


def test_without_the_address_of_the_communicator_nothing_is_revoked(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Backend, "_comm_ptr")
    communicator = made("legacy", said, monkeypatch)
    assert said == ["connect cuda:0", "allreduce"]
    said.clear()
    communicator.drop()
    assert said == ["break the hosts'", "abort"]


@KINDS
def test_whoever_calls_while_memory_is_freed_is_refused_and_does_not_wait(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL frees when the device has come past all that was enqueued, a good part of a step perhaps."""
    del stop, free
    communicator = made(kind, said, monkeypatch)
    freeing, freed = threading.Event(), threading.Event()

    def frees() -> None:
        freeing.set()
        freed.wait()

    communicator._free = frees
    communicator.break_()
    freeing.wait()
    refused = threading.Event()

    def call() -> None:
        with pytest.raises(RuntimeError, match="broken"):
            communicator.call("allreduce", [])
        refused.set()

    caller = threading.Thread(target=call)
    caller.start()
    came = refused.wait(20)
    freed.set()
    caller.join()
    assert came
    communicator.drop()


@KINDS
def test_what_cannot_be_freed_holds_nobody_for_ever(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort that hangs, on a device that came back."""
    del stop, free
    monkeypatch.setattr(nccl, "_FREED_S", 0.01)
    communicator = made(kind, said, monkeypatch)
    let_go = threading.Event()
    communicator._free = let_go.wait
    communicator.drop()
    let_go.set()
    communicator._ending.join()


@pytest.mark.parametrize(
    ("kind", "fails", "ends"),
    [
        ("legacy", "eager_connect_single_device", ["abort"]),
        ("legacy", "allreduce", ["abort"]),
        ("nccl2", "reconfigure", ["abort", "shutdown"]),
    ],
)
def test_what_cannot_be_built_is_ended_at_once(
    kind: str, fails: str, ends: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation's is built beside it, on the same device."""
    ended = started(monkeypatch)

    def fail(*_: Any) -> None:
        raise dist.DistBackendError("a peer did not come")

    monkeypatch.setattr(Backend, fails, fail)
    with pytest.raises(dist.DistBackendError, match="did not come"):
        made(kind, said, monkeypatch)
    for thread in ended:
        thread.join()
    assert [one for one in said if one in ("break the hosts'", "abort", "shutdown")] == ["break the hosts'", *ends]


def test_a_peer_that_does_not_come_holds_nobody_longer_than_a_handshake_may_take(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own limit is an hour: it is of every call, and the first of a kind waits for peers that may be busy."""
    comes = threading.Event()
    monkeypatch.setattr(Backend, "eager_connect_single_device", lambda *_: comes.wait())
    with pytest.raises(RuntimeError, match="has not connected"):
        made("legacy", said, monkeypatch, timedelta(seconds=0.01))
    comes.set()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_handles_of_a_new_communicator_give_this_rank_its_place_and_name_the_first(rank: int) -> None:
    def mine(rank: int) -> str:
        return f"nccl2:{rank}:-1:instance{rank}:host:1"

    asked: list[Callable[[], str]] = []

    def first() -> str:
        asked.append(first)
        return mine(0)

    handles = reconfigure_handles(mine(rank), rank, 4, first)
    assert handles.index(mine(rank)) == rank
    assert handles[0] == mine(0)
    assert len(set(handles)) == 4
    assert len(asked) == (rank != 0)
    for handle in handles:
        backend, its_rank, uuid, *_ = handle.split(":")
        assert (backend, int(its_rank) >= 0, int(uuid)) == ("nccl2", True, -1)


def test_a_build_that_was_left_is_ended_when_it_is_over_after_all(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocking mode nobody can end it before: there is no communicator yet that could be aborted."""
    comes = threading.Event()

    def connect(backend: Backend, device: torch.device) -> None:
        del device
        comes.wait()
        backend.said.append("connected")

    threads = started(monkeypatch)
    monkeypatch.setattr(Backend, "eager_connect_single_device", connect)
    with pytest.raises(RuntimeError, match="has not connected"):
        made("legacy", said, monkeypatch, within=timedelta(milliseconds=10))
    ending = next(thread for thread in threads if thread.name == "rackrun-nccl-end")
    ending.join()
    assert said == ["break the hosts'", "abort"], "there is nothing yet that this could have ended"
    comes.set()
    for thread in threads:
        thread.join()
    assert said[2:] == ["connected", "allreduce", "abort"]


class Work:
    def __init__(self, over: bool) -> None:
        self._over = over

    def is_completed(self) -> bool:
        return self._over


@KINDS
def test_whether_a_work_is_over_is_not_asked_beside_a_call_or_a_break(
    kind: str, stop: str, free: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch holds Python's lock while it looks, and would wait with it for an abort, which waits for the device."""
    del stop, free
    communicator = made(kind, said, monkeypatch)
    over: Any = Work(over=True)
    assert communicator.is_over(over)
    assert not communicator.is_over(Work(over=False))
    backend = communicator.inner
    backend.inside.clear()
    backend.lets_go.clear()
    caller = threading.Thread(target=communicator.call, args=["allreduce", []])
    caller.start()
    backend.inside.wait()
    assert not communicator.is_over(over), "a thread is inside a call"
    backend.lets_go.set()
    caller.join()
    assert communicator.is_over(over)
    communicator.drop()
    assert not communicator.is_over(over), "it is broken: nobody asks any more"


def test_where_nothing_can_be_revoked_who_is_inside_a_call_is_not_waited_for(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the abort lets it out."""
    monkeypatch.setattr(nccl, "_ENQUEUE_S", 0.01)
    monkeypatch.setattr(nccl, "_LEAVE_S", 3600.0)
    monkeypatch.setattr(nccl, "_loaded_nccl", lambda _: None)
    communicator = made("legacy", said, monkeypatch)
    backend = communicator.inner
    backend.lets_go.clear()
    frees = communicator._free

    def free() -> None:
        frees()
        backend.lets_go.set()

    communicator._free = free
    said.clear()
    caller = threading.Thread(target=communicator.call, args=["allreduce", []])
    caller.start()
    backend.inside.wait()
    communicator.drop()
    caller.join()
    assert [one for one in said if one != "break the hosts'"] == ["abort", "allreduce"]
