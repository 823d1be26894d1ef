"""The heartbeat page: what is read is what was written, and limits that were raised hold."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rackrun.link.page import Activity, HeartbeatPage


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    page = HeartbeatPage(HeartbeatPage.create("test"))
    yield page
    page.close()


def test_who_waits_says_how_long_its_own_code_took_and_not_how_long_it_waits(page: HeartbeatPage) -> None:
    page.new_generation(1)
    began = time.monotonic_ns()
    time.sleep(0.02)
    page.collective_entered()
    took = (time.monotonic_ns() - began) // 1_000_000
    time.sleep(0.02)
    assert 20 <= page.own_ms <= took + 1
    page.collective_completed()
    page.collective_entered()
    assert page.own_ms <= page.own_ms_now, "from the end of the last collective"


def test_what_is_expected_raises_all_limits_that_there_are(page: HeartbeatPage) -> None:
    page.enter(Activity.PHASE, deadline_ms=2_000, busy_ms=30_000, least_ms=1_000)
    page.allow(10_000)
    assert (page.deadline_ms, page.busy_ms, page.least_ms) == (10_000, 30_000, 10_000)
    page.enter(Activity.STEP, deadline_ms=1_000)
    page.allow(10_000)
    assert (page.deadline_ms, page.busy_ms, page.least_ms) == (10_000, 0, 0)


def test_a_plain_script_ticks_until_the_control_thread_does(page: HeartbeatPage) -> None:
    assert page.tick_plain()
    assert page.plain_tick_ns
    page.tick()
    assert not page.tick_plain()
