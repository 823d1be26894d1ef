"""A main thread that spins, which is no work: a loop that calls nothing and stores nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from rackrun.worker.process.spin_loops import SpinDetector, idle_loop

FLAG = False
BOX = SimpleNamespace(done=False, count=0)


def for_ever() -> None:
    while True:
        pass


def for_a_flag() -> None:
    while not FLAG:
        pass


def for_an_attribute() -> None:
    while BOX.done is False or BOX.count < 3:
        continue


def for_a_cell(flags: list[int]) -> Callable[[], None]:
    def wait() -> None:
        while flags:
            pass

    return wait


def calls() -> None:
    while BOX.done():
        pass


def counts() -> None:
    n = 0
    while True:
        n += 1


def stores() -> None:
    while True:
        BOX.count = 1


def iterates(numbers: Iterable[int] = ()) -> None:
    for _ in numbers:
        pass


def goes_on_sometimes() -> None:
    while True:
        if FLAG:
            continue
        BOX.done()


def catches() -> None:
    while True:
        try:
            BOX.missing  # noqa: B018
        except AttributeError:
            BOX.count += 1


def adds(a: Any = 0) -> None:
    while True:
        a + 1


def places_in_loops(function: Callable[..., Any]) -> list[bool]:
    """At each instruction: does it belong to an idle loop?"""
    code = function.__code__
    return [idle_loop(code, at) is not None for at in range(0, len(code.co_code), 2)]


@pytest.mark.parametrize("function", [for_ever, for_a_flag, for_an_attribute, for_a_cell([])])
def test_a_loop_that_calls_and_stores_nothing_is_idle(function: Callable[..., Any]) -> None:
    assert any(places_in_loops(function))


@pytest.mark.parametrize(
    "function", [calls, counts, stores, iterates, goes_on_sometimes, catches, adds, places_in_loops]
)
def test_any_other_loop_may_be_work(function: Callable[..., Any]) -> None:
    assert not any(places_in_loops(function))


def test_a_thread_that_spins_is_seen_since_when_and_that_it_goes_on() -> None:
    box = SimpleNamespace(done=False)

    def spin() -> None:
        while not box.done:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    assert thread.ident is not None
    spins = SpinDetector(thread.ident)
    while not (since := spins.poll(7)):
        pass
    assert (since, spins.poll(9)) == (7, 7)
    box.done = True
    thread.join()
    assert spins.poll(11) == 0


def test_another_round_is_another_wait() -> None:
    box = SimpleNamespace(done=False)

    def spin() -> None:
        while not box.done:
            pass

    def twice() -> None:
        spin()
        box.done = False
        spin()

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    assert thread.ident is not None
    spins = SpinDetector(thread.ident)
    while not spins.poll(1):
        pass
    box.done = True
    while box.done:
        pass
    while not spins.poll(2):
        pass
    box.done = True
    thread.join()
