"""Slots and trays that are drained, returned or get notice while all ranks wait in a hold."""

from __future__ import annotations

from typing import Any

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Answer, Decided, FenceWorker, Notice, SetTimer, StartWorker, StopJob
from rackrun.protocol.events import DrainRequested, Event, ReturnRequested, SwapRequested, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import CopiesOver
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in
from tests.core.recovery.held_job import STOP, WEEK_MS, depart, drain, held, job


@pytest.mark.parametrize(
    "request_",
    [
        SwapRequested(request="x", rank=Rank(0), steps=5),
        SwapRequested(request="x", rank=Rank(2), steps=5),
        SwapRequested(request="x", rank=Rank(0), to=SlotId("a/2"), steps=5),
        DrainRequested(request="x", target="a/0", steps=5),
    ],
    ids=str,
)
def test_who_should_leave_a_slot_in_a_hold_is_told_that_all_ranks_wait(request_: Event) -> None:
    """A spare is ready, and without a rack's topology nobody is outside an NVLink clique."""
    refused = only(Answer, held().tell(request_))
    assert (refused.outcome, refused.refusal) == ("refused", "taken")
    assert "all ranks wait in a hold, and no step boundary comes" in refused.text
    assert "ask again when all train" in refused.remedy


def test_a_drain_in_a_hold_that_waits_for_spares_says_that_all_ranks_wait_and_is_done_when_they_train() -> None:
    harness = held()
    begun = only(Answer, harness.tell(DrainRequested(request="x", target="a/0", steps=5, wait=True)))
    what = "rank 0 would have to move, but all ranks wait in a hold, and no step boundary comes; it waits for spares"
    assert (begun.outcome, begun.text) == ("begun", f"drain of a/0: {what}")


def test_a_spare_that_lost_ranks_need_is_said_to_be_theirs() -> None:
    harness = job("swap,wait", repair_patience_ms=WEEK_MS)
    harness.tray_lost("b")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    refused = only(Answer, harness.tell(SwapRequested(request="x", rank=Rank(0), steps=5)))
    assert refused.text.endswith("rank 0 would have to move, and 1 spare is left (a/2) for ranks 2, 3, lost before")


def holds_for_starts(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Rank 2 is lost with its slot's worker, and both spares too. Workers start on b/0, and on a/2 and b/2 no GPU is fit."""
    harness = job(policy, **options)
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
        harness.exits(slot)
    harness.exits("b/0")
    assert only(Decided, harness.park_all()).decision.rung is Rung.HOLD
    assert [one.slot for one in harness.view.spares] == ["b/0"]
    return harness


def test_a_slot_that_is_drained_in_a_hold_is_not_used_and_who_starts_there_is_ended() -> None:
    harness = holds_for_starts()
    (begun,) = drain(harness, "b/0")
    assert begun.outcome == "begun"
    assert begun.text.endswith("no rank is there; its slots are not used, and all ranks wait on for others")
    assert [one.slot for one in every(FenceWorker, harness.answers)] == ["b/0"]
    done = only(Answer, harness.exits("b/0"))
    assert (done.outcome, done.text) == ("done", "b/0 is empty")
    harness.now = WEEK_MS
    for kind in ("owed", "recover"):
        assert not [*every(StopJob, (told := harness.timer(kind))), *every(Answer, told)], "it is not called off"
    assert harness.view.phase == "parking"
    assert not every(StartWorker, harness.answers[-1:])
    harness.join("c", 1)
    last = harness.ready("c/0")
    assert only(Decided, last).decision.targets == {2: "c/0"}
    harness.resume_all()
    assert "b/0" not in [one.slot for one in harness.view.spares]


def test_a_worker_on_a_slot_that_was_drained_in_a_hold_takes_no_rank_though_it_was_ready_before_it_ended() -> None:
    harness = holds_for_starts()
    drain(harness, "b/0")
    assert not every(Decided, harness.ready("b/0"))
    assert harness.view.phase == "parking"


def test_a_spare_starts_elsewhere_at_once_if_its_slot_is_drained_in_a_hold() -> None:
    harness = holds_for_starts()
    harness.checks("b/2")
    assert not [one for one in harness.view.spares if one.slot == "b/2"], "one that starts is enough"
    answers = harness.tell(DrainRequested(request="d", target="b/0", steps=5))
    assert only(StartWorker, answers).slot == "b/2"
    assert only(Decided, harness.ready("b/2")).decision.targets == {2: "b/2"}


def test_a_drain_in_a_hold_is_told_in_the_notice_and_in_the_status() -> None:
    harness = holds_for_starts()
    assert "The hold ends when the spare that starts is ready" in harness.view.hold
    answers = harness.tell(DrainRequested(request="d", target="b/0", because="it burns", steps=5))
    (text,) = (one.text for one in every(Notice, answers) if one.of_hold)
    what = (
        "1 rank to replace; spares: 0 ready, 0 starting; not used: b/0 (drained: it burns). The hold ends when spares"
    )
    assert what in text
    assert harness.view.hold == text


def test_a_slot_that_is_returned_in_a_hold_is_used_again() -> None:
    harness = holds_for_starts()
    drain(harness, "b/0")
    harness.exits("b/0")
    answers = harness.tell(ReturnRequested(request="r", target="b/0"))
    assert only(Answer, answers).text == "b/0 may be used again"
    assert only(StartWorker, answers).slot == "b/0"
    assert "The hold ends when the spare that starts is ready" in harness.view.hold
    assert only(Decided, harness.ready("b/0")).decision.targets == {2: "b/0"}


def test_to_return_a_slot_whose_drain_in_a_hold_is_under_way_calls_the_drain_off() -> None:
    harness = holds_for_starts()
    drain(harness, "b/0")
    answers = every(Answer, harness.tell(ReturnRequested(request="r", target="b/0")))
    assert [one.outcome for one in answers] == ["refused", "done"]
    assert only(StartWorker, harness.exits("b/0")).slot == "b/0"


def test_a_tray_with_ranks_that_is_drained_in_a_hold_is_left_when_all_train() -> None:
    harness = holds_for_starts()
    begun = drain(harness, "b", wait=True)
    assert [one.outcome for one in begun] == ["begun"]
    harness.ready("b/0")
    harness.now = WEEK_MS
    harness.timer("recover")
    assert harness.view.phase == "parking", "the slots of b are out of use from the first moment"
    harness.join("c", 2)
    for spare in ("c/0", "c/1"):
        last = harness.ready(spare)
        if harness.view.phase == "resuming":
            harness.resume_all()
    assert last
    assert "b/1" in [one.slot for one in harness.view.ranks]
    harness.pause_all()
    assert [one.slot for one in every(FenceWorker, harness.answers)][-1] == "b/1"


def test_a_tray_that_keeps_copies_and_is_drained_in_a_hold_is_empty_only_when_all_train() -> None:
    """Nobody can keep them elsewhere before, and they may be the last ones."""
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=2, rules=parse_rules("swap,hold")))
    for tray in ("a", "b", "c"):
        harness.join(tray, 2)
    harness.train("unique")
    for slot in ("c/0", "c/1"):
        harness.checks(slot, "its memory is bad")
    harness.mirrors("b/0", "c", 3, 4)
    harness.mirrors("b/1", "c", 3, 4)
    harness.tray_lost("b")
    harness.park_all(snapshots=(3, 4))
    assert harness.view.hold
    (begun,) = drain(harness, "c")
    assert begun.outcome == "begun"
    assert {one.slot for one in every(FenceWorker, harness.answers)} == {"c/0", "c/1"}
    assert not every(Answer, [*harness.exits("c/0"), *harness.exits("c/1")])
    assert not [one for one in every(SetTimer, harness.answers) if isinstance(one.timer, CopiesOver)]
    harness.join("d", 2)
    harness.ready("d/0")
    assert [one.snapshot[:3] for one in plan_in(harness.ready("d/1")).restores] == ["c:2", "c:2"]
    assert not every(Answer, harness.resume_all())
    over = [one for one in every(SetTimer, harness.answers) if isinstance(one.timer, CopiesOver)][-1]
    harness.now = over.at_ms
    assert only(Answer, harness.tell(TimerFired(timer=over.timer))).text == "c is empty"


def test_a_drain_that_was_under_way_is_called_off_when_a_hold_would_go_on_because_of_it() -> None:
    """The hold began for a spare that was to start, and failed for good."""
    harness = job()
    harness.checks("b/2", "its memory is bad")
    harness.exits("b/2")
    harness.exits("a/2")  # starts again
    assert drain(harness, "b", wait=True)[-1].outcome == "begun"
    harness.exits("b/0")
    assert not every(Answer, harness.park_all())
    assert harness.view.hold
    answers = [*harness.checks("a/2", "its memory is bad"), *harness.exits("a/2", code=1)]
    assert only(Answer, answers).outcome == "refused"
    assert "b/0" in {one.slot for one in every(StartWorker, answers)}


def test_with_a_drain_that_is_called_off_every_other_drain_of_its_slots_is_too() -> None:
    """Else the second would end whoever starts there, again and again, and the hold would have no end."""
    harness = job()
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
        harness.exits(slot)
    for request, target in (("first", "b"), ("second", "b/0")):
        harness.tell(DrainRequested(request=request, target=target, steps=5, wait=True))
    harness.exits("b/0")
    answers = harness.park_all()
    assert [(one.request, one.outcome) for one in every(Answer, answers)] == [
        ("first", "refused"),
        ("second", "refused"),
    ]
    assert harness.view.hold
    assert not [one for one in every(FenceWorker, answers) if one.slot == "b/0"]
    assert plan_in(harness.ready("b/0")).world_size == 4


def test_a_tray_on_which_a_lost_rank_left_its_snapshots_is_not_empty_in_a_hold() -> None:
    """Nobody has copies of them: who switches that tray off loses the rank's state."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=1, rules=parse_rules("swap,hold")))
    for tray in ("a", "b"):
        harness.join(tray, 2)
    harness.train("unique")
    for slot in ("b/0", "b/1"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/0", snapshots=(3, 4))
    harness.park_all(snapshots=(3, 4))
    assert harness.view.hold
    (begun,) = drain(harness, "b")
    assert begun.outcome == "begun"
    assert "it keeps snapshots that may be the only ones, so the drain ends when all train again" in begun.text
    assert "--no-wait" in begun.text
    assert not every(Answer, harness.exits("b/1"))


def test_an_old_timer_of_a_drain_ends_no_later_wait_for_copies() -> None:
    """The tray was empty before a loss; all ranks hold when the timer of that time fires."""
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=4, rules=parse_rules("swap,hold")))
    for tray in "abcd":
        harness.join(tray, 2)
    harness.train("unique")
    for slot in ("b/0", "b/1", "a/0", "a/1"):
        harness.mirrors(slot, "c", 3, 4)
    assert drain(harness, "c")[0].outcome == "begun"
    for slot in ("c/0", "c/1"):
        harness.exits(slot)
    harness.tray_lost("b")
    for slot in ("d/0", "d/1"):
        harness.exits(slot)
    harness.park_all(snapshots=(3, 4))
    assert harness.view.hold
    over = [one for one in every(SetTimer, harness.answers) if isinstance(one.timer, CopiesOver)][-1]
    harness.now = over.at_ms
    assert not every(Answer, harness.tell(TimerFired(timer=over.timer)))


def test_a_tray_that_gets_notice_in_a_hold_is_not_used() -> None:
    harness = holds_for_starts()
    depart(harness, "b")
    assert not every(Decided, harness.ready("b/0"))
    assert harness.view.phase == "parking"
    assert "not used: b/0 (SIGTERM)" in harness.view.hold


def test_a_drain_that_was_under_way_is_called_off_before_a_hold_begins_because_of_it() -> None:
    """Nobody who asked for it knew that all ranks would wait."""
    harness = job()
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
        harness.exits(slot)
    assert drain(harness, "b", wait=True)[-1].outcome == "begun"
    harness.exits("b/0")
    harness.exits("b/1")
    answers = harness.park_all()
    refused = only(Answer, answers)
    assert (refused.outcome, refused.text) == ("refused", "drain of b is called off: the job needs its slots")
    assert [one.slot for one in every(StartWorker, answers)] == ["b/0", "b/1"]


def test_a_drain_that_a_wait_would_call_off_is_refused_at_once() -> None:
    harness = job("swap,wait")
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
        harness.exits(slot)
    harness.exits("b/0")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    (refused,) = drain(harness, "b/0")
    assert (refused.outcome, refused.refusal) == ("refused", "spares")
    assert refused.text == "drain of b/0 is refused: all ranks wait, and the job needs its slots"
    assert refused.remedy
    assert not refused.drained
    assert only(Decided, harness.ready("b/0")).decision.targets == {2: "b/0"}


def waits_for_hardware() -> CoreHarness:
    """Tray b is lost with ranks 2 and 3, and one spare is left: a tray is waited for."""
    harness = job("swap,wait", repair_patience_ms=WEEK_MS)
    harness.tray_lost("b")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    return harness


def test_a_drain_in_a_wait_of_a_slot_whose_gpu_is_broken_is_carried_out() -> None:
    harness = waits_for_hardware()
    harness.judges("a/2", Health.LOST)
    (begun,) = drain(harness, "a/2")
    assert (begun.outcome, begun.text) == ("begun", "drain of a/2: no rank is there")
    assert harness.view.phase == "parking"
    harness.join("c", 3)
    for spare in harness.view.spares:
        if harness.view.phase == "parking":
            harness.ready(spare.slot)
    assert harness.view.phase == "resuming"


def test_a_drain_in_a_wait_of_a_slot_that_may_become_fit_is_refused_with_that_reason() -> None:
    harness = waits_for_hardware()
    harness.exits("a/2")
    harness.checks("a/2", "its memory is bad")
    (refused,) = drain(harness, "a/2")
    assert refused.outcome == "refused"
    assert refused.text == (
        "drain of a/2 is refused: all ranks wait, and the job may need what becomes fit: a/2 (its memory is bad)"
    )


def test_a_stop_in_a_hold_ends_the_job_at_once_after_the_slot_that_could_end_it_was_drained() -> None:
    harness = held()
    harness.join("c", 1)
    assert "The hold ends when the spare that starts is ready" in harness.view.hold
    assert drain(harness, "c/0")[0].outcome == "begun"
    assert stop_in(harness.tell(STOP)).exit_code == 143
