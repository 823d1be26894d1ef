"""A hold: all ranks wait with their state in memory, without a deadline, until a spare is ready or an operator ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rackrun.core.lifecycle.shutdown import DRAIN_MS
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.core.recovery.hold import REMIND_MS
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    Command,
    Decided,
    DrainWorkers,
    FenceWorker,
    Notice,
    RequestRack,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import (
    DepartureAnnounced,
    DrainRequested,
    Event,
    GrowRequested,
    PolicyAnswered,
    PolicyRequested,
    RackRefused,
    ReturnRequested,
    ShrinkRequested,
    StopRequested,
    SwapRequested,
    TimerFired,
)
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation, Rank, SlotId, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Rung
from rackrun.protocol.timers import CondemnedExitsOver, CopiesOver, HoldReminder, RecoverOver
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in

WEEK_MS = 7 * 24 * 3_600_000
STOP = StopRequested(because="rackctl stop", exit_code=143)


def job(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Ranks 0, 1 on a/0, a/1 and 2, 3 on b/0, b/1; the spares wait on a/2 and b/2."""
    given: dict[str, Any] = {"policy_function": policy} if ":" in policy else {"rules": parse_rules(policy)}
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, **given, **options))
    harness.resizes = "in place"
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    return harness


def held(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Tray b is lost with ranks 2 and 3, and one spare is left."""
    harness = job(policy, **options)
    harness.tray_lost("b")
    decided = only(Decided, harness.park_all()).decision
    assert (decided.rung, decided.deadline_s, decided.by) == (Rung.HOLD, 0.0, "order")
    return harness


def remind(harness: CoreHarness) -> Sequence[Command]:
    harness.now += REMIND_MS
    return harness.timer("hold")


def _reminds(command: Command) -> bool:
    return isinstance(command, SetTimer) and isinstance(command.timer, HoldReminder)


def change(harness: CoreHarness, policy: str) -> Sequence[Command]:
    return harness.tell(PolicyRequested(request="p", policy=policy))


# -- without a deadline ------------------------------------------------------------------------------------------------
def test_no_time_ends_a_hold_and_a_tray_that_comes_does() -> None:
    harness = held()
    for kind in ("owed", "recover"):
        harness.now += 600_000
        assert not every(StopJob, harness.timer(kind))
    harness.now += WEEK_MS
    assert not every(StopJob, remind(harness))
    assert harness.view.phase == "parking"
    assert every(StartWorker, harness.join("c", 3))
    for spare in harness.view.spares:
        last = harness.ready(spare.slot)
    assert only(Decided, last).decision.rung is Rung.SWAP
    assert plan_in(last).world_size == 4


def test_patience_for_hardware_is_no_limit_of_a_hold() -> None:
    harness = held(repair_patience_ms=60_000)
    harness.now = 60_000
    assert not every(StopJob, [*harness.timer("repair"), *harness.timer("recover")])
    assert harness.view.phase == "parking"


def test_a_wait_that_is_over_becomes_a_hold() -> None:
    harness = job("swap,wait,hold")
    harness.exits("b/0")
    harness.exits("b/1")
    harness.exits("b/2")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    harness.now = 600_000
    assert only(Decided, harness.timer("recover")).decision.rung is Rung.HOLD
    assert harness.view.phase == "parking"


@pytest.mark.parametrize("policy", ["swap,wait", "swap,wait,hold", "cheapest"])
def test_the_time_of_a_hold_is_not_that_of_a_wait_which_has_its_own(policy: str) -> None:
    harness = held(min_ranks=0)
    harness.now = WEEK_MS
    harness.timer("recover")  # it was set when the generation was broken
    assert every(StartWorker, harness.join("c", 3))
    answers = change(harness, policy)
    decision = only(Decided, answers).decision
    assert (decision.rung, decision.deadline_s) == (Rung.WAIT, 600.0)
    over = only(SetTimer, answers)
    assert (over.timer, over.at_ms) == (RecoverOver(harness.view.generation), WEEK_MS + 600_000)
    harness.now += 599_999
    assert not every(StopJob, harness.timer("recover")), "there may be earlier timers"
    harness.now += 1
    harness.timer("recover")
    assert harness.view.phase == ("parking" if "hold" in policy else "stopped")


def test_a_wait_for_hardware_that_follows_a_hold_has_all_of_its_time() -> None:
    harness = held(repair_patience_ms=3_600_000)
    harness.now = WEEK_MS
    assert not every(Decided, harness.timer("repair")), "patience is no matter of a hold"
    answers = change(harness, "swap,wait")
    assert only(Decided, answers).decision.deadline_s == 3_600.0
    assert [one.at_ms - WEEK_MS for one in every(SetTimer, answers)] == [600_000, 3_600_000]
    harness.now += 600_000
    assert not every(StopJob, harness.timer("recover"))
    harness.now = WEEK_MS + 3_600_000
    stop_in(harness.timer("repair"))


def test_only_the_time_before_a_hold_and_after_it_is_waited() -> None:
    harness = job("swap,wait,hold", repair_patience_ms=60_000)
    harness.tray_lost("b")
    assert only(Decided, harness.park_all()).decision.rung is Rung.WAIT
    harness.now = 20_000
    assert only(Decided, change(harness, "swap,hold")).decision.rung is Rung.HOLD
    harness.now = WEEK_MS
    assert only(Decided, change(harness, "swap,wait,hold")).decision.deadline_s == 40.0


def test_a_slot_that_is_returned_ends_a_hold() -> None:
    harness = job()
    for slot in ("a/2", "b/2"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/1")
    harness.checks("b/1", "its memory is bad")
    harness.park_all()
    harness.now = WEEK_MS
    decided = only(Decided, harness.checks("a/2"))
    assert decided.decision.targets == {3: "a/2"}


def test_a_second_loss_joins_the_same_recovery() -> None:
    harness = held()
    generation = harness.view.generation
    harness.now = WEEK_MS
    decided = only(Decided, harness.exits("a/1"))
    assert (decided.decision.rung, decided.failure.ranks) == (Rung.HOLD, (1, 2, 3))
    assert harness.view.generation == generation
    assert "3 ranks to replace" in only(Notice, remind(harness)).text


def test_a_hold_ends_when_the_last_copy_of_some_state_is_lost() -> None:
    harness = held()
    harness.exits("a/0")
    assert "no copy of its state is left" in stop_in([*harness.exits("a/1"), *harness.timer("owed")]).because


def whose_shards_are_nowhere_else(policy: str, **options: Any) -> CoreHarness:
    """Ranks 0, 1 on a and 2 on b; rank 2 is lost, has left its snapshots, and no GPU of b is fit for another."""
    config = JobConfig(trays_min=2, trays_max=2, spares=1, rules=parse_rules(policy), **options)
    harness = CoreHarness(config)
    harness.join("a", 2)
    harness.join("b", 2)
    harness.train("unique")
    for slot in ("b/0", "b/1"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/0", snapshots=(3, 4))
    harness.park_all(snapshots=(3, 4))
    for kind in ("park", "owed"):
        harness.now += 60_000
        harness.timer(kind)
    assert harness.view.phase == "parking"
    return harness


@pytest.mark.parametrize("policy", ["swap,hold", "swap,wait"])
def test_what_a_rank_leaves_that_is_condemned_long_after_all_have_parked_is_waited_for(policy: str) -> None:
    harness = whose_shards_are_nowhere_else(policy, repair_patience_ms=WEEK_MS)
    condemned = harness.judges("a/1", Health.LOST)
    assert only(FenceWorker, condemned).slot == "a/1"
    assert not every(StopJob, condemned), "its agent has its snapshots, and tells of them when it has exited"
    harness.exits("a/1", snapshots=(3, 4))
    assert harness.view.phase == "parking"
    harness.join("c", 2)
    for spare in harness.view.spares:
        last = harness.ready(spare.slot)
    assert {restore.rank: restore.snapshot for restore in plan_in(last).restores} == {1: "a:2/a/1/2", 2: "b:2/b/0/3"}


def test_what_a_rank_leaves_that_does_not_end_is_not_waited_for_without_end() -> None:
    harness = whose_shards_are_nowhere_else("swap,hold")
    assert only(SetTimer, harness.judges("a/1", Health.LOST)).timer == CondemnedExitsOver(harness.view.generation)
    assert "no copy of some state is left" in stop_in(harness.timer("owed")).because


def test_a_policy_that_comes_before_it_is_known_what_a_condemned_rank_leaves_is_decided_with_it() -> None:
    harness = whose_shards_are_nowhere_else("swap,hold")
    harness.judges("a/1", Health.LOST)
    answer = only(Answer, change(harness, "swap,shrink,hold"))
    assert (answer.outcome, answer.refusal) == ("done", "")
    assert "what becomes of the hold is decided within" in answer.text
    decided = only(Decided, harness.exits("a/1", snapshots=(3, 4))).decision
    assert decided.rung is Rung.HOLD
    harness.core.check_invariants()


def test_a_policy_without_hold_is_refused_until_it_is_known_what_a_condemned_rank_leaves() -> None:
    harness = whose_shards_are_nowhere_else("swap,hold", repair_patience_ms=WEEK_MS)
    harness.judges("a/1", Health.LOST)
    answers = change(harness, "swap,wait")
    answer = only(Answer, answers)
    assert (answer.outcome, answer.refusal) == ("refused", "early")
    assert "ask again in" in answer.remedy
    assert not every(StopJob, answers)
    harness.exits("a/1", snapshots=(3, 4))
    assert only(Answer, change(harness, "swap,wait")).outcome == "done"


# -- what is said ------------------------------------------------------------------------------------------------------
def test_a_notice_says_what_is_missing_and_what_ends_the_hold_every_ten_minutes() -> None:
    harness = job(min_ranks=1)
    harness.tray_lost("b")
    begins = harness.park_all()
    first = only(Notice, begins)
    assert first.text == (
        "all ranks wait in a hold, with their state in memory: ranks 2, 3 lost (b lost: lease lapsed). "
        "2 ranks to replace; spares: 1 ready, 0 starting. The hold ends when spares take over (start a tray, or rackctl return), "
        "or by rackctl policy swap,shrink,hold or rackctl stop."
    )
    assert only(SetTimer, [one for one in begins if _reminds(one)]).at_ms == harness.now + REMIND_MS
    for _ in range(3):
        again = remind(harness)
        assert only(Notice, again) == first
        assert only(SetTimer, again).at_ms == harness.now + REMIND_MS


@pytest.mark.parametrize(
    ("exited", "spares", "ends"),
    [
        (["b/0", "b/1", "b/2"], "1 ready, 1 starting", "the spare that starts is ready"),
        (["b/0", "b/1", "b/2", "a/2"], "0 ready, 2 starting", "those that start are ready"),
    ],
)
def test_a_notice_says_how_many_spares_start_and_asks_for_nothing_if_they_are_enough(
    exited: list[str], spares: str, ends: str
) -> None:
    harness = job()
    for slot in exited:
        harness.exits(slot)
    text = only(Notice, harness.park_all()).text
    assert f"2 ranks to replace; spares: {spares}. The hold ends when {ends}, or by rackctl stop." in text
    told = {1: "1 spare ready, 3 to come", 0: "0 spares ready, 4 to come"}
    assert f"before it swap: 2 ranks to replace, {told[int(spares[0])]}; the last spare" in harness.view.waits
    for spare in harness.view.spares:
        if harness.view.phase == "parking":
            harness.ready(spare.slot)
    assert harness.view.phase == "resuming"


def test_the_status_says_why_all_ranks_wait() -> None:
    harness = job("swap,hold")
    assert not harness.view.waits
    harness.tray_lost("b")
    assert not harness.view.waits, "nothing is decided yet"
    harness.park_all()
    assert harness.view.waits.startswith("ranks 2, 3 lost (b lost: lease lapsed); hold, by the order given: ")
    harness.join("c", 3)
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    assert (harness.view.phase, harness.view.waits) == ("resuming", "")


def test_nothing_more_is_said_when_the_hold_is_over() -> None:
    harness = held()
    timer = only(SetTimer, [one for one in harness.answers if _reminds(one)]).timer
    harness.join("c", 3)
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    harness.resume_all()
    assert not harness.tell(TimerFired(timer=timer))


def test_a_hold_that_begins_again_in_the_same_generation_has_one_reminder() -> None:
    harness = held()
    change(harness, "swap,wait,hold")  # the workers that can start are too few: it goes on
    again = change(harness, "swap,hold")
    assert not [one for one in again if _reminds(one)]


# -- operators ---------------------------------------------------------------------------------------------------------
def test_an_operator_ends_a_hold_by_a_shrink() -> None:
    harness = held(min_ranks=1)
    harness.now = WEEK_MS
    assert plan_in(change(harness, "swap,shrink,hold")).world_size == 2


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


def drain(harness: CoreHarness, target: str, *, wait: bool = False) -> list[Answer]:
    return every(Answer, harness.tell(DrainRequested(request="d", target=target, steps=5, wait=wait)))


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


def test_a_stop_in_a_hold_ends_the_job_at_once_after_the_slot_that_could_end_it_was_drained() -> None:
    harness = held()
    harness.join("c", 1)
    assert "The hold ends when the spare that starts is ready" in harness.view.hold
    assert drain(harness, "c/0")[0].outcome == "begun"
    assert stop_in(harness.tell(STOP)).exit_code == 143


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


def depart(harness: CoreHarness, tray: str) -> Sequence[Command]:
    return harness.tell(DepartureAnnounced(tray=TrayId(tray), because="SIGTERM", exit_code=143))


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


def test_what_a_hold_costs_is_not_said_because_nobody_knows() -> None:
    harness = held()
    assert "GPU-s" not in harness.view.waits
    assert "no deadline" in harness.view.waits


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


# -- who may choose it -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["", "no-wait", "no-hold"])
def test_nothing_but_its_name_leads_to_a_hold(policy: str) -> None:
    harness = job(policy, min_ranks=0)
    harness.tray_lost("b")
    stop = stop_in([*harness.park_all(), *harness.timer("recover")])
    assert "hold" not in stop.because
    assert "hold more" not in stop.remedy


def test_a_function_may_hold_and_is_not_asked_again_by_the_clock() -> None:
    harness = job("mine:choose", repair_patience_ms=60_000)
    harness.tray_lost("b")
    question = only(AskPolicy, harness.park_all()).question
    wants = Decision(rung=Rung.HOLD, deadline_s=30.0, reason="somebody comes")
    answers = harness.tell(PolicyAnswered(question=question, decision=wants))
    assert only(Decided, answers).decision.reason.startswith("hold: somebody comes (")
    assert not [timer for timer in every(SetTimer, answers) if str(timer.timer).startswith("repair")]
    harness.now = WEEK_MS
    assert not every(StopJob, [*harness.timer("repair"), *harness.timer("recover")])
    assert len(every(AskPolicy, harness.answers)) == 1


def test_a_stop_while_the_function_is_asked_about_a_tray_that_has_come_waits_for_its_workers() -> None:
    harness = job("mine:choose")
    harness.tray_lost("b")
    question = only(AskPolicy, harness.park_all()).question
    harness.tell(PolicyAnswered(question=question, decision=Decision(rung=Rung.HOLD)))
    question = only(AskPolicy, harness.join("c", 3)).question
    assert not every(StopJob, harness.tell(STOP))
    assert every(StartWorker, harness.tell(PolicyAnswered(question=question, decision=Decision(rung=Rung.HOLD))))


# -- a journal ---------------------------------------------------------------------------------------------------------
def test_a_journal_that_ends_in_a_hold_told_once_more_goes_on_with_it() -> None:
    journal: list[bytes] = []

    class Recorded(ControlPlane):
        def handle(self, event: Event) -> Sequence[Command]:
            journal.append(msgspec.json.encode(event))
            return super().handle(event)

    config = JobConfig(trays_min=2, trays_max=2, spares=2, rules=parse_rules("swap,hold"))
    harness = CoreHarness(config)
    harness.core = Recorded(config)
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    harness.tray_lost("b")
    harness.park_all()
    remind(harness)
    again = CoreHarness(config)
    again.incarnation, again.now = harness.incarnation, harness.now
    for event in journal:
        again.core.handle(msgspec.json.decode(event, type=Event))
    assert again.view == harness.view
    assert again.view.generation == Generation(2)
    assert "all ranks wait in a hold" in only(Notice, remind(again)).text
    assert every(StartWorker, again.join("c", 3))
    for spare in again.view.spares:
        last = again.ready(spare.slot)
    assert plan_in(last).world_size == 4
