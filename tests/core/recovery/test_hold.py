"""A hold: all ranks wait with their state in memory, without a deadline, for a spare or for an operator who ends it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.core.recovery.hold import REMIND_MS
from rackrun.protocol.commands import (
    Answer,
    AskPolicy,
    Command,
    Decided,
    FenceWorker,
    Notice,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import Event, PolicyAnswered, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Rung
from rackrun.protocol.timers import CondemnedExitsOver, HoldReminder, RecoverOver
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in
from tests.core.recovery.held_job import STOP, WEEK_MS, change, held, job, remind, whose_shards_are_nowhere_else


def _reminds(command: Command) -> bool:
    return isinstance(command, SetTimer) and isinstance(command.timer, HoldReminder)


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
    told = spares.replace("0 ready", "0 spares ready").replace("1 ready", "1 spare ready")
    assert f"before it swap: 2 ranks to replace, {told}; the last spare" in harness.view.waits
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


def test_what_a_hold_costs_is_not_said_because_nobody_knows() -> None:
    harness = held()
    assert "GPU-s" not in harness.view.waits
    assert "no deadline" in harness.view.waits


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
