"""What is done about a tray that stood still: people are told, and if it does so repeatedly, its ranks leave it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.faults.standstills import STANDSTILLS_MAX, WITHIN_MS
from rackrun.protocol.commands import Answer, Command, Notice, PauseWorkers
from rackrun.protocol.events import ReturnRequested
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, condemned, every, only, plan_in


@pytest.fixture
def job() -> CoreHarness:
    """Four trays of two slots; ranks 0 to 5 on a, b, c; d waits."""
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=2))
    for tray in "abcd":
        harness.join(tray, 2, clique="x")
    harness.train()
    assert [spare.slot for spare in harness.view.spares] == ["d/0", "d/1"]
    return harness


def repeatedly(harness: CoreHarness, tray: str, *, every_ms: int = 60_000) -> Sequence[Command]:
    """The tray stands still as often as is too much; what follows from the last time is returned."""
    for _ in range(STANDSTILLS_MAX - 1):
        assert not every(PauseWorkers, harness.stands_still(tray))
        harness.now += every_ms
    return harness.stands_still(tray)


def against(harness: CoreHarness) -> dict[str, str]:
    return {slot: why for tray in harness.view.trays for slot, why in tray.against.items()}


def test_a_tray_that_stood_still_once_loses_nobody_and_people_are_told_where_to_look(job: CoreHarness) -> None:
    answers = job.stands_still("b", 4_200)
    assert [type(one) for one in answers] == [Notice]
    text = only(Notice, answers).text
    assert text.startswith("b stood still for 4.2 s")
    assert "hypervisor" in text
    assert not against(job)


def test_ranks_leave_a_tray_that_stands_still_repeatedly_at_a_step_boundary(job: CoreHarness) -> None:
    answers = repeatedly(job, "b")
    assert "not the first time in 10 minutes" in every(Notice, answers)[0].text
    assert only(PauseWorkers, answers)
    assert against(job) == dict.fromkeys(("b/0", "b/1"), "its tray stood still 3 times within 10 minutes")
    assert [one.slot for one in condemned(job.pause_all())] == ["b/0", "b/1"]
    plan = plan_in(job.park_all(passed=7))
    assert (plan.committed.step, plan.rollback) == (7, None), "no step is done again"
    assert {member.slot for member in plan.members if member.slot.startswith("d")} == {"d/0", "d/1"}


def test_standstills_that_are_far_apart_are_not_counted_together(job: CoreHarness) -> None:
    assert not every(PauseWorkers, repeatedly(job, "b", every_ms=WITHIN_MS // (STANDSTILLS_MAX - 1)))
    assert not against(job)


def test_each_tray_has_a_count_of_its_own(job: CoreHarness) -> None:
    for tray in "abc":
        for _ in range(STANDSTILLS_MAX - 1):
            job.stands_still(tray)
    assert not against(job)


def test_a_spare_on_such_a_tray_is_the_last_choice_but_a_choice(job: CoreHarness) -> None:
    repeatedly(job, "d")
    job.exits("a/0")
    plan = plan_in(job.park_all(passed=7))
    assert plan.members[0].slot in ("d/0", "d/1"), "there is no other"


def test_a_tray_that_a_person_gives_back_begins_anew(job: CoreHarness) -> None:
    repeatedly(job, "d")
    answer = only(Answer, job.tell(ReturnRequested(request="1", target="d")))
    assert answer.forgiven == ("d/0", "d/1")
    for _ in range(STANDSTILLS_MAX - 1):
        job.stands_still("d")
        assert not against(job)
    job.stands_still("d")
    assert [*against(job)] == ["d/0", "d/1"]


def test_a_tray_that_comes_back_begins_anew(job: CoreHarness) -> None:
    repeatedly(job, "d")
    job.tray_lost("d")
    job.join("d", 2, clique="x")
    for _ in range(STANDSTILLS_MAX - 1):
        job.stands_still("d")
    assert not against(job)


# -- several trays -----------------------------------------------------------------------------------------------------
def test_of_trays_that_stand_still_together_none_is_to_blame(job: CoreHarness) -> None:
    harness: list[Command] = []
    for _ in range(2 * STANDSTILLS_MAX):
        for tray in "abcd":
            harness += job.stands_still(tray)
        job.now += 60_000
    assert not every(PauseWorkers, harness)
    assert not against(job)
    first = every(Notice, harness)[4 * (STANDSTILLS_MAX - 1)].text
    assert "4 of 4 trays did so as often within 10 minutes: a common cause is likely" in first


def test_a_tray_that_goes_on_standing_still_when_the_others_have_ceased_is_to_blame(job: CoreHarness) -> None:
    for _ in range(STANDSTILLS_MAX):
        for tray in "abcd":
            job.stands_still(tray)
    job.now += WITHIN_MS
    assert only(PauseWorkers, repeatedly(job, "b"))
    assert [*against(job)] == ["b/0", "b/1"]


def test_the_half_of_the_trays_may_be_to_blame(job: CoreHarness) -> None:
    for _ in range(STANDSTILLS_MAX):
        for tray in "ab":
            job.stands_still(tray)
    assert [*against(job)] == ["a/0", "a/1", "b/0", "b/1"]


def test_where_there_is_one_tray_nobody_has_another_choice() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1))
    harness.join("a", 3)
    harness.train()
    assert "last choice" not in only(Notice, repeatedly(harness, "a")).text
    assert not against(harness)


def test_a_tray_that_stands_still_all_the_time_is_not_told_of_all_the_time(job: CoreHarness) -> None:
    repeatedly(job, "d", every_ms=2_000)
    for _ in range(10):
        job.now += 2_000
        assert not job.stands_still("d")
    job.now += WITHIN_MS
    assert only(Notice, job.stands_still("d"))
