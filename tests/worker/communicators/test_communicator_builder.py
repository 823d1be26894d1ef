"""A generation's communicators are built side by side, and whoever is overtaken leaves them where they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.link.exchange import ExchangeServer
from rackrun.worker.communicators.exchange_store import ExchangeStore
from rackrun.worker.communicators.handshakes import Handshakes
from rackrun.worker.communicators.on_demand import OnDemand
from rackrun.worker.membership import communicator_builder
from rackrun.worker.membership.communicator_builder import Builder

TOKEN = "token"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACKRUN_EAGER_RANKS", raising=False)


@pytest.fixture
def exchange() -> Iterator[str]:
    """Where an exchange serves, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ExchangeServer("127.0.0.1", TOKEN)
    yield asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Group:
    """What a builder asks of an elastic group."""

    communicator: Any = None

    def __init__(self, key: str, rank: int, ranks: Sequence[int]) -> None:
        self.key, self.ranks = key, tuple(ranks)
        self.rank, self.size = (lambda: rank), (lambda: len(ranks))


def group(key: str, rank: int, ranks: Sequence[int] = (0, 1)) -> Any:
    return Group(key, rank, ranks)


class Heard:
    """What a builder has told."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __call__(self) -> None:
        self.over.set()


def build(exchange: str, groups: Sequence[Any], *, patient: bool = False) -> tuple[Builder, Heard]:
    heard = Heard()
    plan: Any = SimpleNamespace(generation=7, store=exchange)
    built = Builder(plan, groups, torch.device("cpu"), TOKEN, patient=patient, done=heard)
    built.start()
    return built, heard


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Any]]:
    """What takes the place of a group's handshake, by the last part of its store's room; gloo's own where there is nothing."""
    made: dict[str, Callable[[], Any]] = {}
    real, store = communicator_builder.build_communicator, ExchangeStore

    class Named(store):  # type: ignore[misc, valid-type]
        def __init__(self, address: str, token: str, room: str) -> None:
            super().__init__(address, token, room)
            self.key = room.split("/")[1]

    def build_communicator(device: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
        return made[store.key]() if store.key in made else real(device, store, rank, size, timeout)

    monkeypatch.setattr(communicator_builder, "ExchangeStore", Named)
    monkeypatch.setattr(communicator_builder, "build_communicator", build_communicator)
    return made


def test_groups_are_built_side_by_side_in_whatever_order_each_rank_has_them(exchange: str) -> None:
    one = build(exchange, [group("a", 0), group("b", 0), group("c", 0)])
    other = build(exchange, [group("c", 1), group("b", 1), group("a", 1)])
    for built, heard in (one, other):
        heard.over.wait()
        built.join()
        assert built.error is None
        assert {group.key for group in built.communicators} == {"a", "b", "c"}
    for built, _ in (one, other):
        for communicator in built.communicators.values():
            communicator.break_()


def test_a_group_of_one_rank_needs_none(exchange: str) -> None:
    built, heard = build(exchange, [group("alone", 0, [0])])
    heard.over.wait()
    assert built.over
    assert built.error is None
    assert not built.communicators


def test_a_large_group_is_not_built_before_somebody_calls_for_it(
    exchange: str, monkeypatch: pytest.MonkeyPatch, handshakes: dict[str, Callable[[], Any]]
) -> None:
    """Who builds waits for nobody: the other rank does not come."""
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "2")
    handshakes["large"] = lambda: pytest.fail("nobody has called for it")
    large = group("large", 0, [0, 1, 2])
    built, heard = build(exchange, [large])
    heard.over.wait()
    built.join()
    assert built.error is None
    assert isinstance(built.communicators[large], OnDemand)
    built.abandon()


def test_a_large_group_that_was_overtaken_is_broken(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "1")
    one = group("large", 0)
    built, _ = build(exchange, [one])
    built.join()
    work = built.communicators[one].call("barrier", dist.BarrierOptions())
    built.abandon()
    with pytest.raises(RuntimeError, match="was broken"):
        work.wait()


def test_two_ranks_that_call_for_a_large_group_build_it(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "1")
    found, works = [], []
    for rank in range(2):
        one = group("large", rank)
        built, _ = build(exchange, [one])
        built.join()
        values = torch.full((1,), rank + 1.0)
        found.append((built, values))
        works.append(built.communicators[one].call("allreduce", [values], dist.AllreduceOptions()))
    for work in works:
        work.wait()
    assert [values.item() for _, values in found] == [3.0, 3.0]
    for built, _ in found:
        built.abandon()


def test_the_handshake_of_a_large_group_is_no_stall_and_the_wait_for_its_members_may_be_one(
    exchange: str, monkeypatch: pytest.MonkeyPatch, handshakes: dict[str, Callable[[], Any]]
) -> None:
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "1")
    seen, counts = [], Handshakes()

    def handshake() -> Any:
        seen.append(counts.are_under_way)
        raise RuntimeError("that was all")

    handshakes["large"] = handshake
    works = []
    for rank in range(2):
        one = group("large", rank)
        plan: Any = SimpleNamespace(generation=7, store=exchange)
        built = Builder(plan, [one], torch.device("cpu"), TOKEN, handshakes=counts)
        built.start()
        built.join()
        works.append(built.communicators[one].call("barrier", dist.BarrierOptions()))
        assert rank or not counts.are_under_way, "the other has not come"
    for work in works:
        with pytest.raises(RuntimeError, match="that was all"):
            work.wait()
    assert seen == [True, True]
    assert not counts.are_under_way


def test_that_one_group_cannot_be_built_is_told_while_others_still_wait(
    exchange: str, handshakes: dict[str, Callable[[], Any]]
) -> None:
    waits = threading.Event()

    def fails() -> Any:
        raise RuntimeError("nobody came")

    def still_waits() -> Any:
        waits.wait()
        return SimpleNamespace(break_=lambda: None)

    handshakes |= {"bad": fails, "slow": still_waits}
    built, heard = build(exchange, [group("slow", 0), group("bad", 0)])
    heard.over.wait()
    assert built.over
    assert str(built.error) == "nobody came"
    assert not built.communicators
    waits.set()
    built.join()


def test_whoever_is_overtaken_while_it_waits_for_the_others_is_not_held(exchange: str) -> None:
    built, heard = build(exchange, [group("a", 0), group("b", 0)], patient=True)
    built.abandon()
    heard.over.wait()
    built.join()
    assert not built.communicators


def test_what_is_ready_after_it_was_overtaken_is_broken(
    exchange: str, handshakes: dict[str, Callable[[], Any]]
) -> None:
    begun, overtaken, broken = threading.Event(), threading.Event(), threading.Event()

    def ready_late() -> Any:
        begun.set()
        overtaken.wait()
        return SimpleNamespace(break_=broken.set)

    handshakes["a"] = ready_late
    built, _ = build(exchange, [group("a", 0)])
    begun.wait()
    built.abandon()
    overtaken.set()
    built.join()
    assert broken.is_set()


def test_a_device_that_cannot_be_used_is_told(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: torch.device) -> None:
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(communicator_builder, "use_device", lost)
    built, heard = build(exchange, [group("a", 0), group("b", 0)])
    heard.over.wait()
    built.join()
    assert built.over
    assert str(built.error) == "the GPU has fallen off the bus"


def test_a_device_with_little_memory_gets_the_old_communicators_back_first(
    exchange: str, handshakes: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    monkeypatch.setattr(communicator_builder, "use_device", lambda _: None)
    old = group("a", 0)
    old.communicator = SimpleNamespace(drop=lambda: order.append("dropped"))
    handshakes["a"] = lambda: order.append("built") or SimpleNamespace(break_=lambda: None)  # type: ignore[func-returns-value]
    for free, expected in ((2**30, ["dropped", "built"]), (2**36, ["built"])):
        order.clear()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2**37))
        plan: Any = SimpleNamespace(generation=7, store=exchange)
        built = Builder(plan, [old], torch.device("cuda", 0), TOKEN)
        built.start()
        built.join()
        assert built.error is None
        assert order == expected
