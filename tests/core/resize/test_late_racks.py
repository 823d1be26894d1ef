"""A rack that comes after it was given up is used if all ranks still wait for it, and given back if not."""

from __future__ import annotations

import pytest

from rackrun.protocol.commands import Answer, DismissTray, PauseWorkers, ReleaseRack, RequestRack, SetTimer, StartWorker
from rackrun.protocol.events import PolicyRequested, RackPreempted, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import TrayId
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import CoreHarness, every, only
from tests.core.resize.job_with_provider import begun, deliver, is_over, lose, refuse, rung, said


def held() -> CoreHarness:
    """All ranks are held, because a rack did not come in time."""
    told = begun("swap,acquire-wait,hold")
    lose(told)
    assert rung(is_over(told, "asked")) is Rung.HOLD
    return told


def test_a_rack_that_is_delivered_late_ends_the_hold() -> None:
    told = held()
    commands = deliver(told, 1, "r")
    assert "rack 1 comes late, and is used all the same: all ranks wait" in said(commands)
    assert not every(ReleaseRack, commands)
    assert {start.slot for start in every(StartWorker, told.join("r", 2))} == {"r/0", "r/1"}
    told.ready("r/0")
    assert rung(told.ready("r/1")) is Rung.SWAP
    told.resume_all()
    told.join("b", 2)  # and it is given back as any other
    told.ready("b/0")
    told.ready("b/1")
    only(PauseWorkers, told.answers)


def test_a_rack_that_was_given_up_before_its_trays_joined_ends_the_hold_when_they_do() -> None:
    told = begun("swap,acquire-wait,hold")
    lose(told)
    deliver(told, 1, "r")
    assert rung(is_over(told, "delivered")) is Rung.HOLD
    commands = told.join("r", 2)
    assert not every(DismissTray, commands)
    assert len(every(StartWorker, commands)) == 2
    told.ready("r/0")
    assert rung(told.ready("r/1")) is Rung.SWAP


def test_a_rack_that_came_too_late_is_used_if_all_wait_when_its_trays_join() -> None:
    told = begun("swap,acquire-train,hold")
    lose(told)
    told.resume_all()
    is_over(told, "asked")
    only(ReleaseRack, deliver(told, 1, "r"))  # all train
    told.tell(PolicyRequested(request="1", policy="swap,hold"))
    told.checks("a/0", "it has no fabric")
    told.exits("a/0")
    assert rung(told.park_all(6)) is Rung.HOLD
    assert only(StartWorker, told.join("r", 2)).slot == "r/0"


def test_a_late_rack_that_does_not_join_either_is_given_up_once_more_and_the_hold_goes_on() -> None:
    told = held()
    deliver(told, 1, "r")
    commands = is_over(told, "delivered")
    assert "rack 1 came to nothing" in said(commands)
    assert rung(commands) is Rung.HOLD


def test_a_rack_that_did_not_come_in_time_is_not_released_as_long_as_all_wait() -> None:
    """It may still come, and is used then: a provider that was told to release it would take it away again."""
    told = held()
    assert not every(ReleaseRack, told.answers)
    deliver(told, 1, "r")
    told.join("r", 2)
    told.ready("r/0")
    told.ready("r/1")
    told.resume_all()
    assert not every(ReleaseRack, told.answers)
    assert "may be taken away" not in said(told.answers)


def test_a_rack_that_did_not_come_in_time_is_released_when_others_have_taken_over() -> None:
    told = held()
    told.join("b", 2)
    told.ready("b/0")
    assert not every(ReleaseRack, told.answers)
    commands = told.ready("b/1")
    assert rung(commands) is Rung.SWAP
    assert only(ReleaseRack, commands).because == "it did not come within 60 s (--acquire-timeout)"
    assert only(ReleaseRack, deliver(told, 1, "r")).because == "it comes too late"


def test_a_rack_that_did_not_come_in_time_is_released_before_another_is_asked_for() -> None:
    told = held()
    commands = told.tell(PolicyRequested(request="1", policy="swap,acquire-wait,hold"))
    assert [type(one) for one in commands if isinstance(one, ReleaseRack | RequestRack)] == [ReleaseRack, RequestRack]
    assert "; it was released before, and may be taken away" in said(deliver(told, 1, "r"))


@pytest.mark.parametrize("failed", [True, False])
def test_a_provider_that_gives_up_a_late_rack_itself_is_told_to_release_what_there_may_be(failed: bool) -> None:
    told = held()
    assert len(every(ReleaseRack, refuse(told, 1, failed=failed))) == failed
    told.join("b", 2)
    told.ready("b/0")
    told.ready("b/1")
    assert len(every(ReleaseRack, told.answers)) == failed


def test_a_notice_says_what_a_rack_that_does_not_come_was_wanted_for() -> None:
    told = held()
    assert (
        said(refuse(told, because="no quota")) == "rack 1, which is late and for which all ranks still wait: no quota"
    )
    trained = begun("swap,acquire-train")
    lose(trained)
    trained.resume_all()
    assert only(ReleaseRack, is_over(trained, "asked")).request == 1
    assert said(refuse(trained, because="it was cancelled")) == "rack 1, which was given up: it was cancelled"


def test_a_request_that_the_provider_expects_to_take_too_long_is_said_to_be_late() -> None:
    late = begun(provider_expected_s=90.0)
    what = "rack 1 is asked for, with 1 tray of 2 slots; it is expected in 90 s, and given up after 60 s"
    assert f"{what} (--acquire-timeout)" in said(lose(late))
    assert "expected in" not in said(lose(begun(provider_expected_s=60.0)))


def test_a_late_rack_that_the_provider_takes_back_is_released() -> None:
    told = held()
    assert only(ReleaseRack, told.tell(RackPreempted(request=1, because="a limit", trays=()))).request == 1


def late_to_join(*trays: str) -> CoreHarness:
    """A hold after a rack with these trays was delivered, and none of them has joined in time."""
    harness = begun("swap,acquire-wait,hold")
    lose(harness)
    deliver(harness, 1, *trays)
    assert rung(is_over(harness, "delivered")) is Rung.HOLD
    return harness


def test_a_rack_that_all_wait_for_is_not_released_when_the_provider_says_once_more_that_it_is_there() -> None:
    told = late_to_join("r")
    commands = deliver(told, 1, "r")
    assert not every(ReleaseRack, commands)
    assert "once more that rack 1 is there: that is ignored" in said(commands)
    told.join("r", 2)
    told.ready("r/0")
    told.ready("r/1")
    told.resume_all()
    assert not every(ReleaseRack, told.answers)
    assert "may be taken away" not in said(told.answers)


@pytest.mark.parametrize("taken", ["x", "r"], ids=["of another", "a part of it"])
def test_a_rack_that_all_wait_for_is_not_given_up_when_trays_are_taken_back_but_not_all_of_its_own(taken: str) -> None:
    told = late_to_join("r", "s")
    assert not every(ReleaseRack, told.tell(RackPreempted(request=1, because="a limit", trays=(TrayId(taken),))))
    assert "rack 1 comes late, and is used all the same" in said(told.join("s", 2))
    assert ("r is told to leave" in str(every(Answer, told.join("r", 2)))) is (taken == "r")


def test_a_rack_that_all_wait_for_is_released_when_all_of_its_trays_are_taken_back() -> None:
    told = late_to_join("r", "s")
    trays = (TrayId("s"), TrayId("r"))
    assert only(ReleaseRack, told.tell(RackPreempted(request=1, because="a limit", trays=trays))).request == 1


def test_a_late_rack_takes_back_only_its_own_failure() -> None:
    """One that was given up because it was not needed has not failed."""
    told = begun("swap,acquire-wait,hold")
    lose(told)
    told.join("b", 2)
    told.ready("b/0")
    told.ready("b/1")
    told.resume_all()
    assert "rack 1 is not needed any more" in said(told.answers)
    lose(told, "b", passed=8)
    refuse(told, 2)
    told.tell(PolicyRequested(request="1", policy="swap,acquire-wait,hold"))
    refuse(told, 3)
    assert "rack 1 comes late" in said(deliver(told, 1, "r"))
    assert rung(is_over(told, "delivered")) is Rung.HOLD
    commands = told.tell(PolicyRequested(request="2", policy="swap,acquire-wait,hold"))
    assert not every(RequestRack, commands)
    assert "3 requests in a row came to nothing" in str(told.view.waits) + str(commands)


def test_a_late_rack_that_is_of_no_use_adds_to_the_failures_since() -> None:
    told = held()
    for request in (2, 3):
        told.tell(PolicyRequested(request=str(request), policy="swap,acquire-wait,hold"))
        refuse(told, request)
    deliver(told, 1, "r")
    told.join("r", 2)
    begun_at = len(told.answers)
    for slot in ("r/0", "r/1"):
        told.judges(slot, Health.LOST)
        told.exits(slot)
    assert "rack 1 came to nothing: it is of no use" in said(told.answers[begun_at:])
    assert not every(RequestRack, told.tell(PolicyRequested(request="4", policy="swap,acquire-wait,hold")))


def test_the_time_of_a_stage_before_a_provider_crashed_does_not_end_that_of_a_late_rack() -> None:
    told = begun("swap,acquire-wait,hold")
    lose(told)
    first = [one.at_ms for one in every(SetTimer, deliver(told, 1, "r", "s")) if str(one.timer) == "rack:1:delivered"]
    assert rung(refuse(told, 1, "the process ended", failed=True)) is Rung.HOLD
    told.now += 1000
    assert "rack 1 comes late" in said(told.join("r", 1))
    told.now = first[0]
    assert not said(told.tell(TimerFired(timer=timer_named("rack:1:delivered"))))
    assert "of rack 1 1 of 2 trays have joined" in said(is_over(told, "delivered"))


def test_trays_that_two_racks_named_belong_to_the_later_one_when_they_come_late() -> None:
    told = begun("swap,acquire-wait,hold")
    lose(told)
    deliver(told, 1, "r")
    is_over(told, "delivered")
    told.tell(PolicyRequested(request="1", policy="swap,acquire-wait,hold"))
    deliver(told, 2, "r")
    assert rung(is_over(told, "delivered", 2)) is Rung.HOLD
    commands = told.join("r", 2)
    assert "rack 2 comes late, and is used all the same" in said(commands)
    assert "rack 2 is there" in said(commands)


def test_a_rack_that_the_provider_takes_back_is_not_used_when_it_joins_all_the_same() -> None:
    told = begun("swap,acquire-wait,hold")
    lose(told)
    deliver(told, 1, "r")
    assert rung(told.tell(RackPreempted(request=1, because="a limit", trays=()))) is Rung.HOLD
    commands = told.join("r", 2)
    assert "r is told to leave" in only(Answer, commands).text
    assert not every(StartWorker, commands)
