"""Members that fall silent while all ranks wait in a hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Answer, Command, FenceWorker, Notice, RequestRack
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in
from tests.core.recovery.held_job import STOP, WEEK_MS, change, held, job, remind, whose_shards_are_nowhere_else


def silent_and_alone(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Ranks 2 and 3 are lost with tray b, and rank 1 too: rank 0, on a/0, has the only copy. One spare is left."""
    harness = held(policy, **options)
    harness.exits("a/1")
    return harness


def stopped(harness: CoreHarness, slot: str = "a/0") -> Sequence[Command]:
    harness.now += 1_100
    return harness.stalls(slot, silent=True, for_ms=1_100, where="it is stopped by a signal")


def all_ready(harness: CoreHarness, tray: str = "c") -> Sequence[Command]:
    """A tray joins, and enough spares are ready."""
    last = harness.join(tray, 3)
    for spare in harness.view.spares:
        if harness.view.phase == "parking":
            last = harness.ready(spare.slot)
    return last


def test_a_silent_member_with_the_only_copy_is_left_alone_in_a_hold() -> None:
    harness = silent_and_alone()
    told = stopped(harness)
    assert not every(FenceWorker, told)
    assert only(Notice, told).text.endswith(
        "Rank 0 is silent (it is stopped by a signal) and keeps the only copy of some state: the hold ends when it "
        "runs again and spares take over, or by rackctl stop."
    )
    for _ in range(3):
        assert not stopped(harness), "it is said once, and then by the reminder"
    assert "Rank 0 is silent" in only(Notice, remind(harness)).text
    assert "Rank 0 is silent" in harness.view.hold


def test_spares_take_over_when_the_silent_member_runs_again() -> None:
    harness = silent_and_alone()
    stopped(harness)
    all_ready(harness)
    assert harness.view.phase == "parking"
    why = "rank 0 is silent (it is stopped by a signal) and keeps the only copy of some state"
    assert f"before it swap: 3 ranks to replace, and {why}" in harness.view.waits
    plan = plan_in(harness.stalls("a/0", over=True))
    assert {restore.rank: restore.sources for restore in plan.restores} == {1: (0,), 2: (0,), 3: (0,)}
    harness.resume_all()
    assert harness.view.phase == "training"


def test_a_hold_does_not_become_a_wait_while_a_member_is_silent() -> None:
    harness = silent_and_alone("swap,wait,hold")
    stopped(harness)
    all_ready(harness)
    assert "wait: rank 0 is silent (it is stopped by a signal)" in harness.view.waits
    assert "Rank 0 is silent" in harness.view.hold
    assert not every(FenceWorker, stopped(harness)), "as in every hold"
    assert plan_in(harness.stalls("a/0", over=True)).world_size == 4


def test_no_rack_is_asked_for_while_a_member_is_silent() -> None:
    harness = silent_and_alone(provider="local")
    stopped(harness)
    assert "the hold goes on" in only(Answer, change(harness, "swap,acquire,hold")).text
    all_ready(harness)
    assert not every(RequestRack, harness.answers)
    assert plan_in(harness.stalls("a/0", over=True)).world_size == 4


def test_a_silent_member_that_runs_again_before_there_are_spares_changes_nothing() -> None:
    harness = silent_and_alone()
    stopped(harness)
    assert "is silent" not in only(Notice, harness.stalls("a/0", over=True)).text
    assert plan_in(all_ready(harness)).world_size == 4


def test_a_silent_member_whose_process_ends_is_lost() -> None:
    harness = silent_and_alone()
    stopped(harness)
    assert "no copy of" in stop_in([*harness.exits("a/0"), *harness.timer("owed")]).because


def test_a_silent_member_whose_replica_has_the_state_is_replaced() -> None:
    harness = held()
    assert only(FenceWorker, stopped(harness, "a/0")).slot == "a/0"
    assert not every(FenceWorker, stopped(harness, "a/1")), "it has the last copy now"
    assert harness.view.phase == "parking"


def test_a_silent_member_whose_snapshot_its_agent_keeps_is_replaced() -> None:
    harness = whose_shards_are_nowhere_else("swap,hold")
    assert only(FenceWorker, stopped(harness, "a/1")).slot == "a/1"


def one_with_and_one_without_its_last_snapshot() -> CoreHarness:
    """Rank 2 is lost and has left its snapshots; rank 0 keeps that of the last step, 4, and rank 1 only that of step
    3."""
    config = JobConfig(trays_min=2, trays_max=2, spares=1, rules=parse_rules("swap,hold"))
    harness = CoreHarness(config)
    harness.join("a", 2)
    harness.join("b", 2)
    harness.train("unique")
    for slot in ("b/0", "b/1"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/0", snapshots=(3, 4))
    harness.timer("gather")
    harness.parks("a/0", snapshots=(3, 4))
    harness.parks("a/1", snapshots=(3,))
    harness.timer("owed")
    assert harness.view.phase == "parking"
    return harness


def test_a_silent_member_without_whose_memory_steps_were_lost_is_left_alone() -> None:
    harness = one_with_and_one_without_its_last_snapshot()
    assert not every(FenceWorker, stopped(harness, "a/1")), "all would go back to step 3"
    assert only(FenceWorker, stopped(harness, "a/0")).slot == "a/0"


def test_of_two_that_fall_silent_together_the_second_is_judged_with_what_the_first_leaves() -> None:
    harness = one_with_and_one_without_its_last_snapshot()
    assert only(FenceWorker, stopped(harness, "a/0")).slot == "a/0"
    assert not every(FenceWorker, stopped(harness, "a/1")), "it is not known yet what rank 0 leaves"
    harness.exits("a/0", snapshots=(3, 4))
    assert "rank 1 is silent" in harness.view.waits
    assert not every(FenceWorker, stopped(harness, "a/1")), "all would go back to step 3"
    plan = plan_in([*all_ready(harness), *harness.stalls("a/1", over=True)])
    assert (plan.committed.step, plan.rollback) == (4, None)


def test_a_silent_member_is_judged_anew_with_each_report() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=1, rules=parse_rules("swap,hold")))
    harness.join("a", 3)
    harness.join("b", 2)
    harness.train("unique")
    for slot in ("b/0", "b/1"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/0", snapshots=(3, 4))
    harness.park_all(snapshots=(3, 4))
    harness.timer("owed")
    assert only(FenceWorker, stopped(harness, "a/0")).slot == "a/0"
    assert not every(FenceWorker, stopped(harness, "a/1")), "it is not known yet what rank 0 leaves"
    harness.exits("a/0", snapshots=(3, 4))
    assert only(FenceWorker, stopped(harness, "a/1")).slot == "a/1", "its agent keeps what it has"


def test_a_silent_member_is_fenced_in_a_wait() -> None:
    harness = job("swap,wait", repair_patience_ms=WEEK_MS)
    harness.tray_lost("b")
    harness.park_all()
    harness.exits("a/1")
    assert only(FenceWorker, stopped(harness)).slot == "a/0"


def test_a_shrink_waits_for_a_silent_member_too() -> None:
    harness = held(min_ranks=1)
    harness.exits("a/1")
    stopped(harness)
    answer = only(Answer, change(harness, "swap,shrink,hold"))
    assert "the hold goes on (shrink: rank 0 is silent" in answer.text
    assert plan_in(harness.stalls("a/0", over=True)).world_size == 1


def test_a_restart_that_is_preferred_to_a_hold_ends_the_wait_for_a_silent_member() -> None:
    harness = silent_and_alone("swap,restart,hold", start_over=True)
    stopped(harness)
    restarted = harness.join("c", 3)
    assert not harness.view.hold
    assert "a/0" in [one.slot for one in every(FenceWorker, restarted)]


def test_an_operator_stops_the_job_while_a_member_is_silent() -> None:
    harness = silent_and_alone()
    stopped(harness)
    assert stop_in(harness.tell(STOP)).exit_code == 143
