"""A hold: all ranks wait with their state in memory, without a deadline, until a spare is ready or an operator ends it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.core.recovery.hold import REMIND_MS
from rackrun.protocol.commands import Answer, AskPolicy, Command, Decided, Notice, SetTimer, StartWorker, StopJob
from rackrun.protocol.events import Event, PolicyAnswered, PolicyRequested, ShrinkRequested, StopRequested, TimerFired
from rackrun.protocol.ids import Generation
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Rung
from rackrun.protocol.timers import DrainOver, HoldReminder
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in

WEEK_MS = 7 * 24 * 3_600_000


def job(policy: str = "swap,hold", **options: object) -> CoreHarness:
    """Ranks 0, 1 on a/0, a/1 and 2, 3 on b/0, b/1; the spares wait on a/2 and b/2."""
    given: dict[str, object] = {"policy_function": policy} if ":" in policy else {"rules": parse_rules(policy)}
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, **given, **options))  # type: ignore[arg-type]
    harness.resizes = "in place"
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    return harness


def held(policy: str = "swap,hold", **options: object) -> CoreHarness:
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


# -- what is said ------------------------------------------------------------------------------------------------------
def test_a_notice_says_what_is_missing_and_what_ends_the_hold_every_ten_minutes() -> None:
    harness = job(min_ranks=1)
    harness.tray_lost("b")
    begins = harness.park_all()
    first = only(Notice, begins)
    assert first.text == (
        "all ranks are held, with their state in memory: ranks 2, 3 lost (b lost: lease lapsed). "
        "2 ranks to replace, ready spares: 1. The hold ends when spares take over (start a tray, or rackctl return), "
        "or by rackctl policy swap,shrink,hold or rackctl stop."
    )
    assert only(SetTimer, [one for one in begins if _reminds(one)]).at_ms == harness.now + REMIND_MS
    for _ in range(3):
        again = remind(harness)
        assert only(Notice, again) == first
        assert only(SetTimer, again).at_ms == harness.now + REMIND_MS


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


def test_an_operator_ends_a_hold_by_a_stop() -> None:
    harness = held()
    harness.tell(StopRequested(because="rackctl stop", exit_code=143))
    assert stop_in(harness.tell(TimerFired(timer=DrainOver()))).exit_code == 143
    assert stop_in(change(held(), "stop")).exit_code == 3


def test_a_hold_that_becomes_a_wait_has_its_deadline_and_no_reminder() -> None:
    harness = held(repair_patience_ms=3_600_000)
    assert only(Decided, change(harness, "swap,wait")).decision.rung is Rung.WAIT
    assert not remind(harness)
    harness.now = 3_600_000
    assert stop_in(harness.timer("repair"))


def test_what_cannot_be_done_leaves_the_hold_as_it_is() -> None:
    harness = held(min_ranks=4)
    assert not every(StopJob, change(harness, "swap,shrink,hold"))
    assert harness.view.phase == "parking"


# -- who may choose it -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["", "no-wait", "no-hold"])
def test_nothing_but_its_name_leads_to_a_hold(policy: str) -> None:
    harness = job(policy, min_ranks=0)
    harness.tray_lost("b")
    stop = stop_in([*harness.park_all(), *harness.timer("recover")])
    assert "hold" not in stop.because
    assert "hold more" not in stop.remedy


def test_a_function_may_hold_and_is_not_asked_again_by_the_clock() -> None:
    harness = job("mine:choose")
    harness.tray_lost("b")
    question = only(AskPolicy, harness.park_all()).question
    wants = Decision(rung=Rung.HOLD, deadline_s=30.0, reason="somebody comes")
    answers = harness.tell(PolicyAnswered(question=question, decision=wants))
    assert only(Decided, answers).decision.reason.startswith("hold: somebody comes (")
    assert not [timer for timer in every(SetTimer, answers) if str(timer.timer).startswith("repair")]
    harness.now = WEEK_MS
    assert not every(StopJob, harness.timer("recover"))
    assert len(every(AskPolicy, harness.answers)) == 1


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
    assert "all ranks are held" in only(Notice, remind(again)).text
    assert every(StartWorker, again.join("c", 3))
    for spare in again.view.spares:
        last = again.ready(spare.slot)
    assert plan_in(last).world_size == 4
