"""An agent that did not run for a while says so, and blames no worker for that time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rackrun.agent.host import proc
from rackrun.agent.workers import standstill
from rackrun.agent.workers.standstill import BOUND_NS, UsageReading, read_moment, stood_still_ns, workers_ran
from rackrun.protocol.events import TrayStoodStill, WorkerExited, WorkerStalled
from tests.agent.conftest import Rig

S = 1_000_000_000
ASLEEP_NS = S // 10
WORKS = """
import threading
from rackrun.protocol.ids import Position
from rackrun.protocol import boot
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
page, wake = HeartbeatPage(boot.current().page_fd), threading.Event()
page.new_generation(1)
for step in range(10_000):
    page.tick()
    if step == 5:
        print("works", flush=True)
    page.enter(Activity.STEP, Position(step), deadline_ms=400)
    wake.wait(0.1)
"""
HOLDS = """
import ctypes, threading
from rackrun.protocol.ids import Position
from rackrun.protocol import boot
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
page = HeartbeatPage(boot.current().page_fd)
page.new_generation(1)
page.enter(Activity.STEP, Position(0), deadline_ms=60_000)
page.tick()
print("works", flush=True)
while True:
    pow(3, 3**13)  # one call that holds the lock
"""


def moment(at_s: float, ran_s: float = 0.0, waited_s: float = 0.0) -> UsageReading:
    return UsageReading(round(at_s * S), round(ran_s * S), round(waited_s * S))


@pytest.mark.parametrize(
    ("now", "stood_s"),
    [
        (moment(0.1), 0),
        (moment(1.0), 0),
        (moment(4.1), 4),
        (moment(4.1, ran_s=0.5), 3.5),
        (moment(4.1, ran_s=3.9), 0),
        (moment(4.1, waited_s=3.9), 0),
        (moment(86_400.1), 86_400),
    ],
    ids=["on time", "late", "stood still", "and then it ran", "busy", "starved", "suspended for a day"],
)
def test_time_in_which_the_agent_neither_ran_nor_waited_for_a_processor_is_a_standstill(
    now: UsageReading, stood_s: float
) -> None:
    assert stood_still_ns(moment(0), now, ASLEEP_NS) == round(stood_s * S)


def test_a_reading_that_failed_is_no_standstill() -> None:
    assert not stood_still_ns(moment(0, waited_s=50), moment(0.1), ASLEEP_NS)


@pytest.mark.parametrize("text", ["", "0", "no number here"])
def test_a_kernel_that_writes_something_else_there_counts_no_waiting(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"
    path.write_text(text)
    monkeypatch.setattr(standstill, "_SCHEDSTAT", str(path))
    assert read_moment().waited_ns == 0


def test_a_clock_that_goes_back_is_no_standstill() -> None:
    assert not stood_still_ns(moment(86_400), moment(1), ASLEEP_NS)


def test_moments_only_grow() -> None:
    before, now = read_moment(), read_moment()
    assert all(a <= b for a, b in zip(before, now, strict=True))
    assert now.at_ns - before.at_ns < BOUND_NS


@pytest.mark.parametrize(
    ("before", "now", "ran"),
    [
        ({"a": 70}, {"a": 70}, False),
        ({"a": 70, "b": 50}, {"a": 72, "b": 51}, False),
        ({"a": 70}, {"a": 110}, True),
        ({"a": 70}, {"a": 86}, True),
        ({"a": 70, "b": 50}, {"a": 70, "b": 90}, True),
        ({"a": 70}, {"a": 74}, None),
        ({}, {}, None),
        ({}, {"a": 40}, None),
        ({"a": 70}, {}, None),
    ],
    ids=[
        "no tick",
        "a tick before and one after",
        "an elastic script's ticks",
        "a plain script's ticks",
        "one of them ran, and the other hangs",
        "too few, and too many",
        "no workers",
        "one that has just begun",
        "one that has gone",
    ],
)
def test_workers_that_ticked_while_their_agent_stood_still_for_4_seconds_ran(
    before: dict[str, int], now: dict[str, int], ran: bool | None
) -> None:
    then, at = ({worker: (ticks, 7) for worker, ticks in which.items()} for which in (before, now))
    assert workers_ran(then, at, 4 * S) is ran


@pytest.mark.parametrize(
    ("ran_s", "ran"),
    [(0.0, False), (0.3, False), (1.0, None), (3.9, True)],
    ids=["none", "at the edges", "some", "all"],
)
def test_a_worker_whose_main_thread_ran_without_a_tick_held_the_interpreters_lock(
    ran_s: float, ran: bool | None
) -> None:
    then = {"a": (70, S), "b": (70, S)}
    assert workers_ran(then, {"a": (71, S), "b": (71, round((1 + ran_s) * S))}, 4 * S) is ran


@pytest.mark.parametrize(("then_s", "now_s"), [(0.0, 900.0), (900.0, 0.0)], ids=["before", "after"])
def test_a_time_of_a_main_thread_that_could_not_be_read_says_nothing(then_s: float, now_s: float) -> None:
    assert workers_ran({"a": (70, round(then_s * S))}, {"a": (71, round(now_s * S))}, 4 * S) is False


async def test_an_agent_that_is_stopped_while_its_worker_holds_the_interpreters_lock_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "BOUND_NS", 500_000_000)
    await rig.start(HOLDS)
    await rig.start_worker()
    await rig.line("works")
    os.kill(rig.agent, signal.SIGSTOP)
    await asyncio.sleep(2.5)  # this is how long it is stopped
    os.kill(rig.agent, signal.SIGCONT)
    told = await rig.coordinator.said(TrayStoodStill)
    assert told.workers_ran is not False
    assert await rig.end() == 0


async def test_a_tray_that_is_frozen_says_so_and_its_workers_are_not_to_blame(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "BOUND_NS", 500_000_000)
    await rig.start(WORKS, stall_floor_ms=200)
    await rig.start_worker()
    await rig.line("works")
    processes = [rig.agent, *proc.descendants(rig.agent)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)  # this is how long it is frozen, and longer than a worker may be without progress
    for pid in reversed(processes):
        os.kill(pid, signal.SIGCONT)
    told = await rig.coordinator.said(TrayStoodStill)
    assert 500 <= told.for_ms < 60_000
    assert told.workers_ran is False
    assert await rig.end() == 0
    assert (await rig.coordinator.exit_of(1)).signal == signal.SIGTERM
    assert not [one for one in rig.coordinator.received if isinstance(one.message, WorkerStalled)]


async def test_an_agent_that_is_stopped_while_its_workers_run_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "BOUND_NS", 500_000_000)
    await rig.start(WORKS)
    await rig.start_worker()
    await rig.line("works")
    os.kill(rig.agent, signal.SIGSTOP)
    await asyncio.sleep(1.2)  # this is how long it is stopped
    os.kill(rig.agent, signal.SIGCONT)
    told = await rig.coordinator.said(TrayStoodStill)
    assert told.workers_ran is True
    assert await rig.end() == 0


async def test_a_tray_that_was_given_up_meanwhile_is_refused_and_ends_its_workers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "BOUND_NS", 200_000_000)
    await rig.start(WORKS)
    await rig.start_worker()
    await rig.line("works")
    processes = [rig.agent, *proc.descendants(rig.agent)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    rig.coordinator.refuse = 409, "it has been given up"
    rig.coordinator.cut()
    await asyncio.sleep(0.5)  # this is how long it is frozen
    for pid in reversed(processes):
        os.kill(pid, signal.SIGCONT)
    assert await rig.agent_exit() == 3
    await rig.all_gone(processes[1:])
    assert not [one for one in rig.coordinator.received if isinstance(one.message, TrayStoodStill | WorkerExited)]
