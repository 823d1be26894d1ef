"""The heartbeat page: what is read is what was written, and limits that were raised hold."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from rackrun.link.heartbeat_page import Activity, HeartbeatPage


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    fd = HeartbeatPage.create("test")
    page = HeartbeatPage(fd)
    os.close(fd)
    yield page
    page.close()


def test_who_waits_says_how_long_its_own_code_took_and_not_how_long_it_waits(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = iter((1_000, 1_020, 1_500, 1_503, 1_600))
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1_000_000 * next(now_ms))
    page.new_generation(1)
    page.collective_entered()
    assert page.own_ms == 20
    page.collective_completed()
    page.collective_entered()
    assert page.own_ms == 3, "from the end of the last collective"
    assert page.own_ms_now == 100


def test_what_is_expected_raises_all_limits_that_there_are(page: HeartbeatPage) -> None:
    page.enter(Activity.PHASE, deadline_ms=2_000, busy_ms=30_000, least_ms=1_000)
    page.allow(10_000)
    assert (page.deadline_ms, page.busy_ms, page.least_ms) == (10_000, 30_000, 10_000)
    page.enter(Activity.STEP, deadline_ms=1_000)
    page.allow(10_000)
    assert (page.deadline_ms, page.busy_ms, page.least_ms) == (10_000, 0, 0)


def test_what_is_allowed_for_a_while_leaves_the_former_limits(page: HeartbeatPage) -> None:
    page.enter(Activity.STEP, deadline_ms=2_000, busy_ms=30_000, least_ms=1_000)
    with page.with_limit_at_least(10_000):
        assert (page.deadline_ms, page.busy_ms, page.least_ms) == (10_000, 30_000, 10_000)
    assert (page.deadline_ms, page.busy_ms, page.least_ms) == (2_000, 30_000, 1_000)
    page.enter(Activity.WAITING)
    with page.with_limit_at_least(10_000):
        assert page.deadline_ms == 0, "nothing counts as a stall"


def test_a_plain_script_ticks_until_the_control_thread_does(page: HeartbeatPage) -> None:
    assert page.tick_plain()
    assert page.plain_tick_ns
    page.tick()
    assert not page.tick_plain()


def test_while_a_rank_waits_for_what_it_does_not_answer_for_nothing_is_a_stall(page: HeartbeatPage) -> None:
    page.enter(Activity.STEP, deadline_ms=2_000)
    with page.no_deadline():
        assert (page.activity, page.deadline_ms) == (Activity.STEP, 0)
    assert page.deadline_ms == 2_000
