"""Of a large group only what is used is built, when it is used; calls on it do not wait, begin in order, and end when it is broken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.errors import StepError, UsageError
from rackrun.worker.communicators.on_demand import EAGER_RANKS, OnDemand, eager_ranks

LOOK = timedelta(milliseconds=1)


class Work(dist.Work):
    """Of a call that is over when it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Built:
    """A communicator that writes down what is called on it."""

    def __init__(self, name: str, begun: list[str], *, batches: bool) -> None:
        self.name, self.begun, self.batches, self.broken = name, begun, batches, False

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        if on_host:
            name += " on hosts"
        if name == "wrong":
            raise RuntimeError("ProcessGroupGloo::wrong: invalid arguments")
        self.begun.append(f"{self.name}: {name}{f' {args[1]}' if len(args) == 3 else ''}")
        return Work()

    def batch(self, operations: Sequence[Any]) -> Any:
        self.begun.append(f"{self.name}: {[f'{name} {peer}' for name, _, peer, _ in operations]}")
        return Work()

    def break_(self) -> None:
        self.broken = True

    def drop(self) -> None:
        self.begun.append(f"{self.name} dropped")


class Site:
    """Where ranks come when they are let."""

    def __init__(self, *, batches: bool = False, rank: int = 1, size: int = 4) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.begun: list[str] = []
        self.built: dict[str, Built] = {}
        self.closed = False
        self.ends: dict[str, Exception | None] = {}
        self.places: list[str] = []
        self._batches = batches
        self._come = threading.Condition()
        queue: Any = SimpleNamespace(is_host=not batches, use=lambda: None, place=self._place)
        self.communicator = OnDemand(self._build, self._close, rank, size, queue)

    def _build(self, name: str, rank: int, size: int) -> Any:
        with self._come:
            self.asked.append((name, rank, size))
            self._come.notify_all()
            self._come.wait_for(lambda: name in self.ends or self.closed)
            error = self.ends.get(name)
        if error is not None:
            raise error
        self.built[name] = Built(name, self.begun, batches=self._batches)
        return self.built[name]

    def _close(self) -> None:
        with self._come:
            self.closed = True
            self._come.notify_all()

    def wait_asked(self, *names: str) -> None:
        with self._come:
            self._come.wait_for(lambda: {name for name, _, _ in self.asked} >= set(names))

    def come(self, name: str, error: Exception | None = None) -> None:
        """All ranks of ``name``."""
        with self._come:
            self.ends[name] = error
            self._come.notify_all()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        self.places.append("within")
        yield
        self.places.append("over")

    def all_reduce(self) -> dist.Work:
        work: dist.Work = self.communicator.call("allreduce", [torch.ones(1)], dist.AllreduceOptions())
        return work

    def send(self, peer: int) -> dist.Work:
        work: dist.Work = self.communicator.call("send", [torch.ones(1)], peer, 0)
        return work


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.communicator.break_()


# -- what is built -----------------------------------------------------------------------------------------------------
def test_nothing_is_built_that_nobody_calls_for(site: Site) -> None:
    assert not site.asked
    work = site.all_reduce()
    site.come("whole")
    assert work.wait()
    assert site.asked == [("whole", 1, 4)]
    assert site.all_reduce().wait()
    assert site.asked == [("whole", 1, 4)], "once"


@pytest.mark.parametrize("collective_first", [True, False])
def test_two_ranks_always_have_a_communicator_of_their_own(site: Site, collective_first: bool) -> None:
    """Whether a collective has been called before, one of them may not know yet."""
    site.come("whole")
    site.come("pair/0-1")
    site.come("pair/1-3")
    if collective_first:
        site.all_reduce().wait()
    site.send(3).wait()
    site.send(0).wait()
    assert [line for line in site.begun if "send" in line] == ["pair/1-3: send 1", "pair/0-1: send 0"]
    assert {one for one in site.asked if one[0] != "whole"} == {("pair/1-3", 0, 2), ("pair/0-1", 1, 2)}


def test_a_receive_from_any_source_is_refused(site: Site) -> None:
    with pytest.raises(StepError, match="receive from any source"):
        site.communicator.call("recv_anysource", [torch.ones(1)], 0)


# -- when calls begin --------------------------------------------------------------------------------------------------
def test_a_call_returns_before_its_communicator_is_there(site: Site) -> None:
    """A send, say, to a rank that receives after a collective that stands behind the send here."""
    sent = site.send(2)
    summed = site.all_reduce()
    site.come("whole")
    assert summed.wait()
    assert not sent.is_completed()
    with pytest.raises(RuntimeError, match="still being built"):
        sent.wait(LOOK)
    site.come("pair/1-2")
    assert sent.wait()
    assert sent.is_success()


def test_calls_begin_in_their_order(site: Site) -> None:
    works = [site.communicator.call(name, dist.AllreduceOptions()) for name in ("first", "second", "third")]
    assert not site.begun
    site.come("whole")
    for work in works:
        work.wait()
    site.communicator.call("fourth", dist.AllreduceOptions()).wait()
    assert site.begun == [f"whole: {name}" for name in ("first", "second", "third", "fourth")]


def test_a_call_that_is_late_stands_where_its_caller_was(site: Site) -> None:
    work = site.all_reduce()
    assert not site.places
    site.come("whole")
    work.wait()
    assert site.places == ["within", "over"]
    site.all_reduce().wait()
    assert site.places == ["within", "over"], "where the caller is: in the caller's own thread"


def test_a_call_that_is_late_is_not_synchronous_for_its_thread(site: Site) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = site.communicator.call("allreduce", [torch.ones(1)], options)
    site.come("whole")
    assert work.wait()
    assert options.asyncOp


def test_a_future_is_complete_when_the_call_is_over(site: Site) -> None:
    heard = threading.Event()
    future = site.all_reduce().get_future()
    future.add_done_callback(lambda _: heard.set())
    assert not future.done()
    site.come("whole")
    heard.wait()


def test_what_hangs_on_a_future_may_call_for_more(site: Site) -> None:
    """As a communication hook does that reduces twice."""
    again: list[Any] = []
    heard = threading.Event()

    def call_again(_: Any) -> None:
        again.append(site.all_reduce().wait())
        heard.set()

    site.all_reduce().get_future().add_done_callback(call_again)
    site.come("whole")
    heard.wait()
    assert again == [True]


def test_wrong_arguments_are_known_where_they_are_waited_for(site: Site) -> None:
    work = site.communicator.call("wrong", dist.AllreduceOptions())
    site.come("whole")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid arguments"):
            work.wait()
        assert work.is_completed()
    assert work.refused
    assert not work.is_success()
    assert site.all_reduce().wait(), "the communicator is as good as before"


# -- batches -----------------------------------------------------------------------------------------------------------
def of_device(*operations: tuple[str, int]) -> tuple[Site, dist.Work]:
    site = Site(batches=True)
    work = site.communicator.batch([(name, torch.ones(1), peer, 0) for name, peer in operations])
    return site, work


def test_of_a_batch_nothing_begins_before_all_pairs_are_there() -> None:
    site, work = of_device(("send", 2), ("recv", 0), ("recv", 2))
    site.wait_asked("pair/1-2", "pair/0-1")  # side by side
    site.come("pair/1-2")
    behind = site.send(2)
    with pytest.raises(RuntimeError, match="still being built"):
        work.wait(LOOK)
    assert not site.begun
    site.come("pair/0-1")
    work.wait()
    behind.wait()
    assert site.begun == ["pair/0-1: ['recv 0']", "pair/1-2: ['send 1', 'recv 1']", "pair/1-2: send 1"]


@pytest.mark.parametrize("order", [(0, 2, 3), (3, 2, 0), (2, 3, 0)])
def test_a_batch_goes_through_its_pairs_in_an_order_that_is_the_same_on_all_ranks(order: tuple[int, ...]) -> None:
    site, work = of_device(*[("send", peer) for peer in order])
    for name in ("pair/1-3", "pair/1-2", "pair/0-1"):
        site.come(name)
    work.wait()
    site.communicator.batch([("send", torch.ones(1), peer, 0) for peer in order]).wait()
    pairs = [line.partition(":")[0] for line in site.begun]
    assert pairs == ["pair/0-1", "pair/1-2", "pair/1-3"] * 2


def test_ranks_that_go_through_their_pairs_in_that_order_never_wait_for_each_other_in_a_ring() -> None:
    """Even where a device does one pair after another."""
    for size in range(2, 9):
        peers = {rank: {(rank + step) % size for step in (1, -1, 2)} - {rank} for rank in range(size)}
        for rank in range(size):
            for peer in peers[rank]:
                peers[peer].add(rank)
        left = {
            rank: sorted((min(rank, peer), max(rank, peer)) for peer in found) for rank, found in peers.items() if found
        }
        while any(left.values()):
            met = {pairs[0] for rank, pairs in left.items() if pairs and left[sum(pairs[0]) - rank][:1] == pairs[:1]}
            assert met, "somebody can go on"
            left = {rank: [pair for pair in pairs if pair not in met] for rank, pairs in left.items()}


def test_where_the_hosts_move_bytes_a_batch_is_called_one_by_one(site: Site) -> None:
    work = site.communicator.batch([("send", torch.ones(1), 2, 0), ("recv", torch.ones(1), 2, 1)])
    site.come("pair/1-2")
    work.wait()
    assert site.begun == ["pair/1-2: send 1", "pair/1-2: recv 1"]


# -- ends --------------------------------------------------------------------------------------------------------------
def ends_badly(work: dist.Work, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()


def test_a_break_ends_what_waits_for_a_build_and_leaves_the_build(site: Site) -> None:
    summed, sent = site.all_reduce(), site.send(2)
    failed = threading.Event()
    summed.get_future().add_done_callback(lambda _: failed.set())
    site.wait_asked("whole", "pair/1-2")
    site.communicator.break_()
    ends_badly(summed, "was broken")
    ends_badly(sent, "was broken")
    failed.wait()
    with pytest.raises(RuntimeError, match="was broken"):
        site.all_reduce()
    assert not site.begun


def test_what_is_ready_after_a_break_is_broken_and_nothing_begins_on_it() -> None:
    class Late(Site):
        def _close(self) -> None:
            """The handshake goes on: it cannot be broken."""

    site = Late()
    work = site.all_reduce()
    site.wait_asked("whole")
    site.communicator.break_()
    site.come("whole")
    for thread in threading.enumerate():
        if thread.name == "rackrun-build-whole":
            thread.join()
    assert site.built["whole"].broken
    assert not site.begun
    ends_badly(work, "was broken")


def test_a_build_that_fails_fails_all_that_wait(site: Site) -> None:
    summed, sent = site.all_reduce(), site.send(2)
    site.come("pair/1-2", RuntimeError("rank 2 did not come"))
    ends_badly(sent, "pair/1-2 could not be built: rank 2 did not come")
    ends_badly(summed, "pair/1-2 could not be built")
    with pytest.raises(RuntimeError, match="could not be built"):
        site.all_reduce()


def test_what_is_dropped_is_broken_first(site: Site) -> None:
    site.come("whole")
    site.all_reduce().wait()
    site.communicator.drop()
    assert site.built["whole"].broken
    assert site.begun[-1] == "whole dropped"


# -- from how many ranks on --------------------------------------------------------------------------------------------
def test_the_limit_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACKRUN_EAGER_RANKS", raising=False)
    assert eager_ranks() == EAGER_RANKS
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "1")
    assert eager_ranks() == 1


@pytest.mark.parametrize("text", ["0", "-4", "many", "2.5"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", text)
    with pytest.raises(UsageError, match="is no number of ranks"):
        eager_ranks()
