"""A spare makes a communicator of its own before it is needed, and nobody waits for it."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.communicators import nccl_warmup
from rackrun.worker.communicators.nccl_warmup import warm_nccl
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended, say
from tests.worker.scripts import adam, ddp, fit

Train = Callable[..., Ended]
GPU = torch.device("cuda", 3)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be used."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


class Double:
    """``fails``: the call that does. ``waits``: connecting takes until somebody lets it go."""

    def __init__(self, fails: str = "", *, waits: bool = False) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.go = threading.Event()
        self._fails = fails
        if not waits:
            self.go.set()

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name == self._fails:
            raise RuntimeError(f"no {name}")

    def connect(self, device: torch.device) -> None:
        assert device == GPU
        assert self.go.wait(60.0)
        self._called("connect")

    def use(self) -> None:
        self._called("use")

    def drop(self) -> None:
        self._called("drop")


def ended(thread: threading.Thread | None) -> None:
    assert thread is not None
    assert thread.daemon, "the process may end meanwhile"
    thread.join(60.0)
    assert not thread.is_alive()


def test_it_is_made_used_and_dropped_by_one_thread_for_which_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_warmup, "say", pytest.fail)
    double = Double(waits=True)
    thread = warm_nccl(GPU, double)
    assert not double.calls
    double.go.set()
    ended(thread)
    assert double.calls == ["connect", "use", "drop"]
    assert double.threads.isdisjoint({threading.get_ident()})
    assert len(double.threads) == 1


@pytest.mark.parametrize("fails", ["connect", "use", "drop"])
def test_what_fails_is_told_dropped_and_stops_nobody(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(nccl_warmup, "say", told.append)
    double = Double(fails)
    ended(warm_nccl(GPU, double))
    assert double.calls[-1] == "drop"
    (text,) = told
    assert text.endswith(f"will be cold: RuntimeError: no {fails}")


def test_without_a_gpu_there_is_nothing_to_warm() -> None:
    assert warm_nccl(torch.device("cpu"), Double("connect")) is None


@pytest.mark.parametrize("synchronous", [None, "work"])
def test_the_communicator_is_of_one_rank_on_the_device_of_its_own_thread_and_stream(
    synchronous: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``synchronous``: what a call gives, which depends on torch's version."""
    said: list[str] = []

    class Group:
        @staticmethod
        def Options() -> Any:
            return types.SimpleNamespace(config=types.SimpleNamespace(blocking=None))

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            del store
            assert options.config.blocking == 1, "as of the real communicator"
            said.append(f"rank {rank} of {size}")

        def eager_connect_single_device(self, device: torch.device) -> None:
            said.append(f"connects on {device}")

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            said.append(f"sums {tensors[0].numel()}")
            return synchronous and types.SimpleNamespace(wait=lambda: said.append("waits"))

        def abort(self) -> None:
            said.append("aborts")

    class Stream:
        def __enter__(self) -> None:
            said.append("in its own stream")

        def __exit__(self, *_: object) -> None:
            pass

        def synchronize(self) -> None:
            said.append("the device has done it")

    zeros = torch.zeros

    def on_host(size: int, *, device: torch.device) -> torch.Tensor:
        assert device == GPU
        return zeros(size)

    monkeypatch.setattr(torch, "zeros", on_host)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(f"uses {device}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(nccl_warmup, "say", pytest.fail)
    ended(warm_nccl(GPU))
    assert said == [
        *("uses cuda:3", "rank 0 of 1", "connects on cuda:3", "in its own stream", "sums 1"),
        *(["waits"] if synchronous else []),
        *("the device has done it", "aborts"),
    ]


def test_spares_do_so_and_ranks_do_not(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[torch.device] = []
    monkeypatch.setattr("rackrun.worker.loop.unit_runner.warm_nccl", warmed.append)

    def main(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model), steps=4)
        say(warmed=len(warmed))

    reference = train(main)
    late = max(index for index, what in enumerate(reference.moments[1]) if what.startswith("committed")) - 1
    found = train(main, kill={1: late})
    assert not found.differences(reference), found
    assert {rank: found.said[rank]["warmed"] for rank in found.said} == {0: 0, 1: 1, 2: 0}
