"""A rack is asked of a provider, waited for or trained without, used, and given back; a provider is believed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    Command,
    Decided,
    DismissTray,
    FenceWorker,
    Notice,
    PauseWorkers,
    ReleaseRack,
    RequestRack,
    ResumeGeneration,
    SetTimer,
    StartWorker,
)
from rackrun.protocol.events import (
    GrowRequested,
    PolicyAnswered,
    PolicyRequested,
    RackDelivered,
    RackPreempted,
    RackRefused,
    ShrinkRequested,
    TimerFired,
)
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Rung
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks, stop_in


def begun(
    rules: str = "swap,acquire-wait,shrink",
    *,
    provider: str = "local",
    spares: int = 0,
    provider_expected_s: float | None = None,
) -> CoreHarness:
    """Two trays of two slots, all of which train; with ``spares``, a third for them."""
    config = JobConfig(
        trays_min=2 + bool(spares),
        trays_max=2 + bool(spares),
        spares=spares,
        min_ranks=1,
        no_progress_max=99,
        provider=provider,
        provider_expected_s=provider_expected_s,
        rules=parse_rules(rules),
        acquire_timeout_ms=60_000,
    )
    harness = CoreHarness(config)
    harness.resizes = "in place"
    for tray in ("a", "b", "c")[: config.trays_min]:
        harness.join(tray, 2)
    harness.train()
    return harness


def lose(harness: CoreHarness, tray: str = "b", snapshots: Sequence[int] = (), *, passed: int = 4) -> Sequence[Command]:
    harness.tray_lost(tray)
    return harness.park_all(passed, snapshots=snapshots)


def deliver(harness: CoreHarness, request: int, *trays: str) -> Sequence[Command]:
    return harness.tell(RackDelivered(request=request, trays=tuple(map(TrayId, trays))))


def refuse(
    harness: CoreHarness, request: int = 1, because: str = "no quota", *, failed: bool = False
) -> Sequence[Command]:
    return harness.tell(RackRefused(request=request, because=because, failed=failed))


def is_over(harness: CoreHarness, stage: str, request: int = 1) -> Sequence[Command]:
    """The time of a stage; it comes when the core has said that it would."""
    name = f"rack:{request}:{stage}"
    timer = [command for command in harness.answers if isinstance(command, SetTimer) and str(command.timer) == name][-1]
    harness.now = max(harness.now, timer.at_ms)
    return harness.tell(TimerFired(timer=timer_named(name)))


def said(commands: Sequence[Command]) -> str:
    return "\n".join(command.text for command in commands if isinstance(command, Notice))


def rung(commands: Sequence[Command]) -> Rung:
    return only(Decided, commands).decision.rung


def reason(commands: Sequence[Command]) -> str:
    return only(Decided, commands).decision.reason


def serve(harness: CoreHarness, tray: str = "r", request: int = 1) -> Sequence[Command]:
    """Its trays join, its workers start, take over and train."""
    deliver(harness, request, tray)
    harness.join(tray, 2)
    out = [command for slot in (f"{tray}/0", f"{tray}/1") for command in harness.ready(slot)]
    harness.resume_all()
    return out


# -- it comes ----------------------------------------------------------------------------------------------------------
def test_all_stand_still_until_the_rack_has_come_and_its_workers_take_the_lost_ranks_over() -> None:
    harness = begun()
    asked = lose(harness)
    assert rung(asked) is Rung.ACQUIRE
    request = only(RequestRack, asked)
    assert (request.request, request.trays, request.slots) == (1, 1, 2)
    assert not every(ResumeGeneration, asked)
    assert not said(deliver(harness, 1, "r")), "it is there when its trays have joined"
    joined = harness.join("r", 2)
    assert {start.slot for start in every(StartWorker, joined)} == {"r/0", "r/1"}
    harness.ready("r/0")
    done = harness.ready("r/1")
    assert rung(done) is Rung.SWAP
    assert ranks(plan_in(done)) == {0: "a/0", 1: "a/1", 2: "r/0", 3: "r/1"}
    harness.resume_all()
    assert harness.view.phase == "training"
    assert not every(ReleaseRack, harness.answers), "it is needed"


def test_the_name_of_a_tray_may_be_told_after_it_has_joined() -> None:
    harness = begun()
    lose(harness)
    assert len(every(StartWorker, harness.join("r", 2))) == 2
    assert "rack 1 is there: r, 2 slots" in said(deliver(harness, 1, "r"))


def test_the_others_train_on_meanwhile_and_the_world_grows_when_the_rack_has_come() -> None:
    harness = begun("swap,acquire-train")
    commands = lose(harness)
    assert rung(commands) is Rung.ACQUIRE
    assert only(RequestRack, commands).trays == 1
    assert plan_in(commands).world_size == 2
    harness.resume_all()
    deliver(harness, 1, "r")
    assert len(every(StartWorker, harness.join("r", 2))) == 2
    harness.ready("r/0")
    harness.ready("r/1")
    assert every(PauseWorkers, harness.answers)
    harness.pause_all()
    grown = harness.park_all()
    assert plan_in(grown).world_size == 4
    assert {"r/0", "r/1"} <= set(ranks(plan_in(grown)).values())


def test_a_second_loss_while_a_rack_is_waited_for_asks_for_no_second_one() -> None:
    harness = begun()
    lose(harness)
    harness.exits("a/1")
    harness.timer("gather")
    assert len(every(RequestRack, harness.answers)) == 1


def test_a_rack_of_which_some_trays_never_join_is_used_as_far_as_it_goes() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r", "never")
    harness.join("r", 2)
    assert "of rack 1 1 of 2 trays have joined" in said(is_over(harness, "delivered"))
    harness.ready("r/0")
    assert rung(harness.ready("r/1")) is Rung.SWAP


def test_a_rack_that_is_too_small_is_used_after_the_next_rung() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    commands = harness.join("r", 1)
    assert rung(commands) is Rung.SHRINK
    assert "acquire: with the rack that came 1 of 2 workers that are missing can come" in reason(commands)
    harness.resume_all()
    assert not every(ReleaseRack, harness.answers)
    harness.ready("r/0")
    harness.pause_all()
    assert plan_in(harness.park_all()).world_size == 3


# -- it does not come --------------------------------------------------------------------------------------------------
def test_without_a_provider_acquire_is_refused_with_the_reason() -> None:
    commands = lose(begun(provider=""))
    assert rung(commands) is Rung.SHRINK
    assert "acquire: there is no provider (--provider)" in reason(commands)


def test_after_a_refusal_the_next_rung_is_taken_and_the_reason_said_but_another_failure_asks_again() -> None:
    harness = begun()
    lose(harness)
    commands = refuse(harness)
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: the provider refused it: no quota" in reason(commands)
    assert not every(ReleaseRack, commands), "there is nothing to take back"
    harness.resume_all()
    harness.exits("a/1")
    assert only(RequestRack, harness.park_all()).request == 2


def test_one_that_hangs_is_waited_for_until_the_deadline_and_the_request_is_taken_back() -> None:
    harness = begun()
    lose(harness)
    commands = is_over(harness, "asked")
    assert only(ReleaseRack, commands).request == 1
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: it did not come within 60 s (--acquire-timeout)" in reason(commands)


def test_one_that_fails_is_told_to_take_back_what_there_may_be() -> None:
    harness = begun()
    lose(harness)
    commands = refuse(harness, because="OSError: no such queue", failed=True)
    assert only(ReleaseRack, commands).request == 1
    assert "the provider failed: OSError: no such queue" in reason(commands)


def test_with_no_other_rung_the_job_ends_with_the_reason_when_the_provider_has_failed() -> None:
    harness = begun("swap,acquire-wait")
    lose(harness)
    stop = stop_in(refuse(harness))
    assert stop.exit_code == 3
    assert "acquire: rack 1: the provider refused it: no quota" in stop.because


def test_a_rack_that_is_said_to_be_there_and_never_joins_is_not_waited_for_without_end() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    commands = is_over(harness, "delivered")
    assert only(ReleaseRack, commands).request == 1
    assert "rack 1: it was delivered, and none of its trays joined within 120 s" in reason(commands)


@pytest.mark.parametrize("trays", [("a",), ("r", "a"), ()])
def test_a_rack_of_trays_that_are_in_the_job_already_is_none(trays: tuple[str, ...]) -> None:
    harness = begun()
    lose(harness)
    commands = deliver(harness, 1, *trays)
    assert rung(commands) is Rung.SHRINK
    assert "the provider says that it is" in reason(commands)
    assert not every(Answer, commands), "the job's own trays stay"


def test_the_same_rack_for_two_requests_is_none() -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    harness.tray_lost("a")
    harness.park_all()
    commands = deliver(harness, 2, "r")
    assert "the provider says that it is r, in the job before" in said(commands)


def test_a_rack_that_is_delivered_twice_is_the_same_rack() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    assert "once more" in said(deliver(harness, 1, "r", "s"))
    harness.ready("r/0")
    assert rung(harness.ready("r/1")) is Rung.SWAP


def test_a_rack_that_comes_after_it_was_cancelled_is_sent_back_and_not_used() -> None:
    harness = begun()
    lose(harness)
    is_over(harness, "asked")
    harness.resume_all()
    late = deliver(harness, 1, "r")
    assert only(ReleaseRack, late).because == "it comes too late"
    commands = harness.join("r", 2)
    assert not every(StartWorker, commands)
    assert only(DismissTray, commands).tray == "r"


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


@pytest.mark.parametrize("request_", [1, 5])
def test_a_late_or_made_up_delivery_that_names_trays_of_the_job_sends_none_of_them_away(request_: int) -> None:
    harness = begun()
    lose(harness)
    is_over(harness, "asked")
    harness.resume_all()
    commands = deliver(harness, request_, "a")
    assert "nobody wants it" in said(commands)
    assert not every(Answer, commands)
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


def test_workers_that_never_become_ready_are_not_waited_for_without_end() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    commands = is_over(harness, "joined")
    assert only(ReleaseRack, commands).request == 1
    assert rung(commands) is Rung.SHRINK
    assert "none of its workers was ready within 600 s" in reason(commands)


def test_a_rack_whose_workers_all_fail_is_given_back() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    for slot in ("r/0", "r/1") * 3:
        commands = harness.exits(slot, code=1)
    assert "rack 1 came to nothing: it is of no use: its workers fail (r/1: exit code 1)" in said(commands)
    assert only(ReleaseRack, commands).request == 1
    assert "shrink" in {one.decision.rung.value for one in every(Decided, harness.answers)}


def test_after_three_requests_in_a_row_of_which_nothing_came_there_is_no_fourth() -> None:
    harness = begun("swap,acquire-wait,shrink")
    for number in (1, 2, 3):
        assert only(RequestRack, lose(harness, passed=10 * number)).request == number
        refuse(harness, number)
        harness.resume_all()
        harness.join("b", 2)
        harness.ready("b/0")
        harness.ready("b/1")
        harness.pause_all()
        harness.park_all(10 * number)
        harness.resume_all()
        assert harness.view.world_size == 4
    commands = lose(harness, passed=40)
    assert rung(commands) is Rung.SHRINK
    why = "acquire: 3 requests in a row came to nothing (the last: rack 3: the provider refused it: no quota)"
    assert why in reason(commands)


def test_racks_that_are_lost_before_they_were_of_use_are_not_asked_for_again_and_again() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    harness.join("r", 2)
    harness.ready("r/0")
    commands = harness.tray_lost("r")
    assert rung(commands) is Rung.SHRINK
    assert "acquire: rack 1: it was lost before it was of use" in reason(commands)
    assert len(every(RequestRack, harness.answers)) == 1


def test_racks_that_served_and_then_broke_are_counted_in_a_row_too() -> None:
    harness = begun("swap,acquire-wait,shrink")
    for number, tray in enumerate("rst", start=1):
        lose(harness, passed=10 * number)
        serve(harness, tray, number)
        for slot in (f"{tray}/0", f"{tray}/1"):
            harness.judges(slot, Health.LOST)
        for slot in (f"{tray}/0", f"{tray}/1"):
            harness.exits(slot)
        commands = harness.park_all(10 * number)
        assert f"rack {number} came to nothing: it is of no use: none of its slots can be used" in said(harness.answers)
        assert rung(commands) is Rung.SHRINK
        harness.resume_all()
        harness.join("b", 2)
        harness.ready("b/0")
        harness.ready("b/1")
        harness.pause_all()
        harness.park_all(10 * number)
        harness.resume_all()
    assert "acquire: 3 requests in a row came to nothing" in reason(lose(harness, passed=40))


# -- it goes -----------------------------------------------------------------------------------------------------------
def test_a_request_is_cancelled_when_the_lost_ranks_have_come_back_otherwise() -> None:
    harness = begun()
    lose(harness)
    harness.join("b", 2)
    harness.ready("b/0")
    harness.ready("b/1")
    commands = harness.resume_all()
    assert only(ReleaseRack, commands).because == "every rank has a worker"
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


def test_a_rack_is_given_back_when_the_jobs_own_trays_suffice_again() -> None:
    """First spares start there, then ranks go over between two steps, then its trays are dismissed, then it is released."""
    harness = begun()
    lose(harness)
    serve(harness)
    back = harness.join("b", 2)
    assert {start.slot for start in every(StartWorker, back)} == {"b/0", "b/1"}
    harness.ready("b/0")
    commands = harness.ready("b/1")
    assert "rack 1 is given back" in said(commands)
    assert every(PauseWorkers, commands)
    harness.pause_all()
    plan = plan_in(harness.park_all())
    assert ranks(plan) == {0: "a/0", 1: "a/1", 2: "b/0", 3: "b/1"}
    harness.resume_all()
    for slot in ("r/0", "r/1"):
        harness.exits(slot)
    assert only(DismissTray, harness.answers).tray == "r"
    assert only(ReleaseRack, harness.tray_lost("r")).because == "its trays are gone"


def test_a_rack_that_is_lost_is_released_and_another_one_is_asked_for() -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    assert only(ReleaseRack, harness.tray_lost("r")).request == 1
    assert only(RequestRack, harness.park_all()).request == 2


def test_on_notice_of_preemption_ranks_leave_what_it_names() -> None:
    harness = begun("swap,acquire-wait", spares=2)
    lose(harness, "b")
    harness.resume_all()  # the spares on c have taken over
    lose(harness, "c")
    serve(harness)
    harness.join("b", 2)
    harness.ready("b/0")
    harness.ready("b/1")
    commands = harness.tell(RackPreempted(request=1, because="the queue needs it"))
    assert every(PauseWorkers, commands)
    harness.pause_all()
    assert {"b/0", "b/1"} <= set(ranks(plan_in(harness.park_all())).values())


def test_on_notice_for_a_part_of_a_rack_spares_start_on_the_rest_and_ranks_go_there() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r", "s")
    for tray in ("r", "s"):
        harness.join(tray, 2)
    for slot in ("r/0", "r/1"):
        harness.ready(slot)
    harness.resume_all()
    harness.timer("calm")
    commands = harness.tell(RackPreempted(request=1, because="the queue needs it", trays=(TrayId("r"),)))
    assert {start.slot for start in every(StartWorker, commands)} == {"s/0", "s/1"}
    harness.ready("s/0")
    assert every(PauseWorkers, harness.ready("s/1"))
    harness.pause_all()
    assert ranks(plan_in(harness.park_all())) == {0: "a/0", 1: "a/1", 2: "s/0", 3: "s/1"}
    harness.resume_all()
    for slot in ("r/0", "r/1"):
        harness.exits(slot)
    assert only(DismissTray, harness.answers).tray == "r"
    harness.tray_lost("r")
    assert not every(ReleaseRack, harness.answers), "the rest of it is in use"


@pytest.mark.parametrize(("request_", "trays"), [(1, ("a",)), (7, ("a",)), (7, ())])
def test_a_notice_of_preemption_drains_nothing_that_is_not_of_that_rack(request_: int, trays: tuple[str, ...]) -> None:
    harness = begun()
    lose(harness)
    serve(harness)
    commands = harness.tell(RackPreempted(request=request_, because="mine now", trays=tuple(map(TrayId, trays))))
    assert not every(Answer, commands)
    assert not [tray for tray in harness.view.trays if tray.withdrawn]


# -- what it costs -----------------------------------------------------------------------------------------------------
def test_how_long_a_rack_takes_is_learnt_from_the_first_one() -> None:
    harness = begun()
    lose(harness)
    harness.now += 4_000
    serve(harness)
    harness.tray_lost("r")
    commands = harness.park_all()
    assert only(Decided, commands).decision.figures["request_s"] == 4.0


def test_one_that_comes_as_it_lied_teaches_nothing() -> None:
    harness = begun()
    lose(harness)
    deliver(harness, 1, "r")
    is_over(harness, "delivered")
    harness.resume_all()
    harness.exits("a/1")
    assert only(Decided, harness.park_all()).decision.figures["request_s"] == 600.0


# -- a function of the user's ------------------------------------------------------------------------------------------
def answered(harness: CoreHarness, decision: Decision) -> Sequence[Command]:
    question = every(AskPolicy, harness.answers)[-1].question
    return harness.tell(PolicyAnswered(question=question, decision=decision))


def with_a_function(provider: str = "local", resizes: str = "in place") -> CoreHarness:
    config = JobConfig(
        trays_min=2, trays_max=2, spares=0, min_ranks=1, provider=provider, policy_function="mine:choose"
    )
    harness = CoreHarness(config)
    harness.resizes = resizes
    harness.join("a", 2)
    harness.join("b", 2)
    harness.train()
    return harness


def test_a_function_may_limit_how_long_all_stand_still_and_is_asked_again_then() -> None:
    harness = with_a_function()
    provider = only(AskPolicy, lose(harness)).view.provider
    assert provider is not None
    assert (provider.asked_s, provider.came, provider.patience_s) == (None, False, 3600.0)
    wanted = Decision(rung=Rung.ACQUIRE, meanwhile="wait", deadline_s=20.0)
    commands = answered(harness, wanted)
    assert only(Decided, commands).decision.deadline_s == 20.0
    only(RequestRack, commands)
    harness.now += 20_000
    provider = only(AskPolicy, harness.timer("repair")).view.provider
    assert provider is not None
    assert provider.asked_s == 20.0
    commands = answered(harness, Decision(rung=Rung.ACQUIRE, meanwhile="train"))
    assert plan_in(commands).world_size == 2
    assert not every(RequestRack, commands), "one is out"


@pytest.mark.parametrize(
    ("provider", "meanwhile", "why"),
    [
        ("", "wait", "acquire is impossible: there is no provider (--provider)"),
        ("local", "train", "acquire is impossible: it is fixed"),
    ],
)
def test_a_function_that_asks_for_what_cannot_be_is_told_why_and_the_default_decides(
    provider: str, meanwhile: Literal["wait", "train"], why: str
) -> None:
    harness = with_a_function(provider, resizes="")
    lose(harness)
    commands = answered(harness, Decision(rung=Rung.ACQUIRE, meanwhile=meanwhile))
    assert f"the policy mine:choose asks for what cannot be: {why}; the default decides" in said(commands)
    assert only(Decided, commands).decision.by == "default"


# -- together with what a person wants -----------------------------------------------------------------------------------
def one_slot_each(trays: str, rules: str = "swap,acquire-wait,shrink") -> CoreHarness:
    config = JobConfig(
        trays_min=len(trays), trays_max=len(trays), spares=0, min_ranks=1, provider="local", rules=parse_rules(rules)
    )
    harness = CoreHarness(config)
    harness.resizes = "in place"
    for tray in trays:
        harness.join(tray, 1)
    harness.train()
    return harness


def shrink(harness: CoreHarness, to: int) -> Sequence[Command]:
    out = list(harness.tell(ShrinkRequested(request=f"to {to}", to=to, steps=9)))
    if every(PauseWorkers, out):
        out += harness.pause_all()
        out += harness.park_all()
        for slot in [fenced.slot for fenced in every(FenceWorker, out)]:
            harness.exits(slot)
        out += harness.resume_all()
    return out


def test_no_more_racks_are_asked_for_than_a_person_wants_ranks() -> None:
    harness = one_slot_each("abcd")
    shrink(harness, to=2)
    for tray in "dc":
        harness.tray_lost(tray)
    assert only(RequestRack, lose(harness)).trays == 1, "two ranks are wanted, and one lives"


def test_a_rack_that_comes_to_a_world_that_is_to_stay_small_is_not_waited_for() -> None:
    harness = begun("acquire-train,shrink")
    assert every(RequestRack, lose(harness))
    harness.resume_all()
    assert harness.view.world_size == 2
    assert only(ReleaseRack, shrink(harness, to=2)).request == 1
    assert not every(RequestRack, harness.tell(GrowRequested(request="back", to=0))), "only the next failure asks again"


def test_a_rack_is_kept_by_a_policy_that_has_come_to_forbid_swaps() -> None:
    harness = begun("swap,acquire-wait")
    lose(harness)
    serve(harness)
    assert harness.view.world_size == 4
    harness.tell(PolicyRequested(request="p", policy="no-swap"))
    started = harness.join("b", 2)
    assert not every(StartWorker, started), "nobody could go over to them"
    assert not every(ReleaseRack, harness.answers)
