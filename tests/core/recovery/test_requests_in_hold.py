"""What operators may ask for while all ranks wait in a hold: to end it, to stop, to resize, to change the policy."""

from __future__ import annotations

import pytest

from rackrun.core.lifecycle.shutdown import DRAIN_MS
from rackrun.protocol.commands import Answer, Decided, DrainWorkers, Notice, RequestRack, StopJob
from rackrun.protocol.events import GrowRequested, RackRefused, ShrinkRequested
from rackrun.protocol.policy_types import Rung
from tests.core.core_harness import every, only, plan_in, stop_in
from tests.core.recovery.held_job import STOP, WEEK_MS, change, depart, held, job, remind


def test_an_operator_ends_a_hold_by_a_shrink() -> None:
    harness = held(min_ranks=1)
    harness.now = WEEK_MS
    assert plan_in(change(harness, "swap,shrink,hold")).world_size == 2


def test_an_operator_ends_a_hold_by_a_restart() -> None:
    harness = job(start_over=True)
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/1")
    harness.checks("b/1", "its memory is bad")
    harness.park_all()
    harness.checks("b/1")
    assert only(Decided, change(harness, "restart")).decision.rung is Rung.RESTART
    assert harness.view.phase == "restarting"


def test_an_operator_ends_a_hold_at_once_by_a_stop() -> None:
    assert stop_in(held().tell(STOP)).exit_code == 143
    answers = change(held(), "stop")
    assert only(Answer, answers).text.endswith("; the job ends now")
    assert stop_in(answers).exit_code == 3


def test_a_shrink_to_a_size_is_refused_in_a_hold_and_the_way_to_shrink_is_named() -> None:
    harness = held(min_ranks=1)
    refused = only(Answer, harness.tell(ShrinkRequested(request="s", to=2, steps=5)))
    assert (refused.refusal, "rackctl policy swap,shrink,hold" in refused.remedy) == ("taken", True)


def test_a_growth_is_refused_in_a_hold_and_the_ways_to_end_it_are_named() -> None:
    harness = held(min_ranks=1)
    refused = only(Answer, harness.tell(GrowRequested(request="g")))
    assert (refused.outcome, refused.refusal) == ("refused", "taken")
    assert "all ranks wait in a hold, and no step boundary comes" in refused.text
    assert ("start a tray" in refused.remedy, "rackctl policy swap,shrink,hold" in refused.remedy) == (True, True)


def test_a_growth_that_is_asked_for_while_lost_ranks_are_waited_for_is_answered_when_all_train() -> None:
    harness = job("swap,wait", min_ranks=1, repair_patience_ms=WEEK_MS)
    harness.tray_lost("b")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    begun = only(Answer, harness.tell(GrowRequested(request="g")))
    what = "grow to 4 ranks: when it is decided what becomes of ranks 2, 3"
    assert (begun.outcome, begun.text) == ("begun", what)
    harness.join("c", 3)
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    done = only(Answer, harness.resume_all())
    assert (done.outcome, done.text) == ("done", "the world has 4 of 4 ranks")


def test_a_notice_to_the_last_tray_in_a_hold_leaves_it_the_time_to_drain() -> None:
    harness = held()
    harness.now = WEEK_MS
    answers = depart(harness, "a")
    assert not every(StopJob, answers), "the state in memory is there as long as the tray is"
    assert "the job ends in 60 s, or at a step boundary if spares take over before" in str(every(Notice, answers))
    assert not every(StopJob, remind(harness))
    harness.now = WEEK_MS + DRAIN_MS
    stopped = stop_in(harness.timer("drain"))
    assert stopped.exit_code == 143
    assert stopped.because.startswith("SIGTERM, and no other tray stays")


def test_a_tray_that_comes_after_a_notice_to_the_last_one_in_a_hold_lets_the_job_end_at_a_step_boundary() -> None:
    harness = held()
    depart(harness, "a")
    harness.join("c", 3)
    for spare in harness.view.spares:
        last = harness.ready(spare.slot)
    assert plan_in(last).world_size == 4
    harness.resume_all()
    assert every(DrainWorkers, harness.answers)
    assert not every(StopJob, harness.answers)


def test_who_stops_a_job_whose_last_tray_has_notice_in_a_hold_need_not_wait() -> None:
    harness = held()
    depart(harness, "a")
    assert stop_in(harness.tell(STOP)).exit_code == 143


def test_when_the_last_tray_is_gone_before_the_time_to_drain_is_over_the_exit_code_is_that_of_the_notice() -> None:
    harness = held()
    depart(harness, "a")
    harness.tray_lost("a")
    harness.timer("owed")
    assert stop_in(harness.answers).exit_code == 143


def test_a_stop_in_a_hold_that_ends_by_itself_is_carried_out_at_the_next_step_boundary() -> None:
    harness = held()
    harness.join("c", 3)
    assert not every(StopJob, harness.tell(STOP)), "the workers of c start"
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    assert every(DrainWorkers, harness.resume_all())


def test_a_stop_that_was_asked_for_before_a_hold_is_carried_out_when_the_hold_begins() -> None:
    harness = job()
    assert not every(StopJob, harness.tell(STOP))
    harness.tray_lost("b")
    stop = stop_in(harness.park_all())
    assert (stop.exit_code, stop.because) == (143, "rackctl stop; all ranks wait, and no step boundary comes")


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        ("swap,wait", "rackctl policy swap,wait,hold"),
        ("swap,restart,stop", "rackctl policy swap,restart,hold"),
        ("shrink", "rackctl policy swap,shrink,hold"),
        ("cheapest", "rackctl policy swap,hold"),
        ("no-restart", "rackctl policy swap,hold"),
    ],
)
def test_a_policy_that_would_end_the_job_at_once_is_refused_in_a_hold_and_changes_nothing(
    policy: str, remedy: str
) -> None:
    harness = held(min_ranks=0)
    before = harness.view
    answers = change(harness, policy)
    refused = only(Answer, answers)
    assert (refused.outcome, refused.refusal) == ("refused", "policy")
    assert f"{policy} would end the job at once (" in refused.text
    assert remedy in refused.remedy
    assert not every(StopJob, answers)
    assert not every(Decided, answers)
    assert harness.view == before


@pytest.mark.parametrize(
    ("policy", "effect"),
    [
        ("swap,restart,hold", "the hold goes on (restart: no checkpoint is on disk"),
        ("swap,hold", "the hold goes on"),
        ("swap,shrink,hold", "the hold ends now, by shrink"),
        ("swap,hold,restart", "the hold goes on"),
        ("mine:choose", "mine:choose is asked what becomes of the hold"),
    ],
)
def test_an_operator_who_changes_the_policy_in_a_hold_is_told_what_becomes_of_it(policy: str, effect: str) -> None:
    text = only(Answer, change(held(min_ranks=1), policy)).text
    assert text.startswith("from now on: --policy ")
    assert f"; {effect}" in text


def test_a_policy_that_waits_says_for_how_long_and_what_follows() -> None:
    harness = job("swap,wait", repair_patience_ms=3_600_000)
    harness.tray_lost("b")
    harness.park_all()
    harness.now = 600_000
    texts = [only(Answer, change(harness, policy)).text for policy in ("swap,wait", "swap,wait,hold", "swap,hold")]
    assert texts[0].endswith("; all ranks wait for at most 3000 s from now, then the job ends")
    assert texts[1].endswith("; all ranks wait for at most 3000 s from now, then hold follows")
    assert texts[2].endswith("; all ranks wait on, now without a deadline (hold)")


def test_a_policy_that_waits_for_a_rack_is_not_said_to_end_the_wait() -> None:
    for policy, effect in (("swap,hold", "the hold becomes a wait"), ("swap,wait", "all ranks wait on,")):
        harness = job(policy, provider="mine:racks", repair_patience_ms=3_600_000)
        harness.tray_lost("b")
        harness.park_all()
        answers = change(harness, "swap,acquire-wait")
        assert only(Answer, answers).text.endswith(f"; {effect} for a rack (acquire), for at most 3600 s from now")
        assert harness.view.phase == "parking"


def test_a_policy_that_would_end_the_job_at_once_is_refused_in_a_wait_too() -> None:
    harness = job("swap,wait", repair_patience_ms=3_600_000, min_ranks=0)
    harness.tray_lost("b")
    harness.park_all()
    assert only(Answer, change(harness, "swap,shrink")).outcome == "refused"
    assert harness.view.phase == "parking"


def test_a_policy_that_comes_while_all_train_is_for_the_next_failure() -> None:
    harness = job()
    assert ";" not in only(Answer, change(harness, "swap")).text
    harness.tray_lost("b")
    stop_in(harness.park_all())


def test_a_hold_that_becomes_a_wait_has_its_deadline_and_no_reminder() -> None:
    harness = held(repair_patience_ms=3_600_000)
    assert only(Decided, change(harness, "swap,wait")).decision.rung is Rung.WAIT
    assert not remind(harness)
    harness.now = 3_600_000
    stop_in(harness.timer("repair"))


def test_what_cannot_be_done_leaves_the_hold_as_it_is() -> None:
    harness = held(min_ranks=4)
    assert not every(StopJob, change(harness, "swap,shrink,hold"))
    assert harness.view.phase == "parking"


def test_an_operator_who_changes_the_policy_has_the_provider_asked_again() -> None:
    harness = job("swap,acquire,hold", provider="mine:racks")
    harness.tray_lost("b")
    assert only(RequestRack, harness.park_all()).request == 1
    harness.tell(RackRefused(request=1, because="no quota"))
    for kind in ("owed", "recover"):
        harness.now += 600_000
        assert not every(RequestRack, harness.timer(kind)), "it is not asked again by itself"
    assert only(RequestRack, change(harness, "swap,acquire,hold")).request == 2
    harness.tell(RackRefused(request=2, because="no quota"))
    assert harness.view.waits.startswith("ranks 2, 3 lost (b lost: lease lapsed); hold, by the order given: ")
