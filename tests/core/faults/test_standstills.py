"""What is done about a tray that stood still: people are told, and if it does so repeatedly, its ranks leave it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.faults.standstills import STANDSTILLS_MAX, WITHIN_MS
from rackrun.protocol.commands import Answer, Command, Notice, PauseWorkers
from rackrun.protocol.events import ReturnRequested, TimerFired, TrayStoodStill
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import StandstillsGathered
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
    answers = job.stands_still("b", for_ms=4_200)
    assert [type(one) for one in answers] == [Notice]
    text = only(Notice, answers).text
    assert text.startswith(
        "the agent of b did not answer for 4.2 s, and does again. The workers there stood still with it"
    )
    assert "hypervisor" in text
    assert "probation" not in text
    assert not against(job)


def test_of_an_agent_that_stood_still_alone_people_are_told_that_nobody_waited_for_it(job: CoreHarness) -> None:
    text = only(Notice, job.stands_still("b", ran=True)).text
    assert "The workers there went on: only the agent was stopped" in text
    assert "host" not in text


def test_where_it_is_not_known_whether_the_workers_went_on_the_notice_says_so(job: CoreHarness) -> None:
    text = only(Notice, job.stands_still("b", ran=None)).text
    assert "Whether the workers there went on is not known" in text
    assert "Only the agent was stopped or held up, or its host was suspended" in text


def test_an_agent_that_stands_still_alone_costs_its_tray_nothing_however_often(job: CoreHarness) -> None:
    harness: list[Command] = []
    for _ in range(2 * STANDSTILLS_MAX):
        harness += job.stands_still("b", ran=True)
    assert len(every(Notice, harness)) == STANDSTILLS_MAX, "people know of the others"
    assert not every(PauseWorkers, harness)
    assert not against(job)
    assert "probation" not in only(Notice, job.stands_still("b")).text, "those were not counted"


def test_before_the_last_standstill_that_has_no_consequence_people_are_told_what_the_next_one_has(
    job: CoreHarness,
) -> None:
    texts = [only(Notice, job.stands_still("b")).text for _ in range(STANDSTILLS_MAX - 1)]
    assert ["after 3 its slots are on probation, and its ranks leave them" in text for text in texts] == [False, True]


def test_ranks_leave_a_tray_that_stands_still_repeatedly_at_a_step_boundary(job: CoreHarness) -> None:
    answers = repeatedly(job, "b")
    assert "3 times within 10 minutes now: its slots are on probation" in every(Notice, answers)[0].text
    only(PauseWorkers, answers)
    assert against(job) == dict.fromkeys(("b/0", "b/1"), "its tray stood still 3 times within 10 minutes")
    assert {slot: why for tray in job.view.trays for slot, why in tray.probation.items()} == against(job), (
        "in the status"
    )
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
def test_trays_that_stood_still_together_are_told_in_one_notice(job: CoreHarness) -> None:
    text = only(Notice, job.stands_still("d", "b", "a", for_ms=(4_100, 4_100, 4_300))).text
    assert text.startswith("the agents of a, b, d did not answer for 4.1 to 4.3 s, and do again.")
    assert only(Notice, job.stands_still(*"abcd")).text.startswith("the agents of all 4 trays did not answer for 4.0 s")


def test_of_many_trays_the_notice_names_a_few() -> None:
    harness = CoreHarness(JobConfig(trays_min=7, trays_max=7, spares=1))
    for at in range(7):
        harness.join(f"t{at}", 1)
    harness.train()
    text = only(Notice, harness.stands_still(*(f"t{at}" for at in range(6)))).text
    assert "the agents of t0, t1, t2, t3 and 2 more did not answer" in text


def test_trays_whose_workers_stood_still_and_those_whose_workers_went_on_are_told_apart(job: CoreHarness) -> None:
    job.tell(TrayStoodStill(tray=TrayId("a"), for_ms=4_000, workers_ran=True))
    job.tell(TrayStoodStill(tray=TrayId("b"), for_ms=4_000, workers_ran=False))
    texts = [one.text for one in every(Notice, job.tell(TimerFired(timer=StandstillsGathered())))]
    assert [text.split(" did not")[0] for text in texts] == ["the agent of b", "the agent of a"]


def test_what_follows_for_some_of_the_trays_names_them(job: CoreHarness) -> None:
    job.stands_still("b")
    assert "Of b: 2 times within 10 minutes now" in only(Notice, job.stands_still("a", "b")).text


def test_of_a_tray_that_is_lost_meanwhile_nothing_is_told(job: CoreHarness) -> None:
    job.tell(TrayStoodStill(tray=TrayId("d"), for_ms=4_000))
    job.tray_lost("d")
    assert not every(Notice, job.tell(TimerFired(timer=StandstillsGathered())))


def test_of_trays_that_stand_still_together_none_is_to_blame(job: CoreHarness) -> None:
    harness: list[Command] = []
    for _ in range(2 * STANDSTILLS_MAX):
        harness += job.stands_still(*"abcd")
        job.now += 60_000
    assert not every(PauseWorkers, harness)
    assert not against(job)
    texts = [one.text for one in every(Notice, harness)]
    assert len(texts) == STANDSTILLS_MAX, "one each time, and then people know"
    assert "4 of 4 trays did so as often within 10 minutes: a common cause is likely" in texts[-1]


def test_a_tray_that_goes_on_standing_still_when_the_others_have_ceased_is_to_blame(job: CoreHarness) -> None:
    for _ in range(STANDSTILLS_MAX):
        for tray in "abcd":
            job.stands_still(tray)
    job.now += WITHIN_MS
    only(PauseWorkers, repeatedly(job, "b"))
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
    assert "probation" not in only(Notice, repeatedly(harness, "a")).text
    assert not against(harness)


def test_a_tray_that_stands_still_all_the_time_is_not_told_of_all_the_time(job: CoreHarness) -> None:
    repeatedly(job, "d", every_ms=2_000)
    for _ in range(10):
        job.now += 2_000
        assert not job.stands_still("d")
    job.now += WITHIN_MS
    only(Notice, job.stands_still("d"))
