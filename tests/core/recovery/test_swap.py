"""The rules of a recovery in place: break, gather, park, decide, resume."""

from __future__ import annotations

from typing import Any

import pytest

from rackrun.core.generation.snapshot_locations import SnapshotLocations
from rackrun.protocol.commands import (
    BreakGeneration,
    Command,
    FenceWorker,
    Restore,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import CostsMeasured, ScriptFailure, WorkerExited, WorkerParked, WorkerResumed
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks, stop_in


def test_a_loss_breaks_the_survivors_at_once_and_opens_the_window(training: CoreHarness) -> None:
    broken = training.exits("a/1")
    announced = only(BreakGeneration, broken)
    assert (announced.generation, [w.slot for w in announced.workers]) == (2, ["a/0", "b/0", "b/1"])
    assert announced.because == "rank 1 lost (SIGKILL)"
    assert {str(timer.timer) for timer in every(SetTimer, broken)} == {"gather:2", "park:2", "recover:2"}


def test_the_spare_of_the_same_tray_takes_over_and_the_reason_has_the_figures(training: CoreHarness) -> None:
    training.exits("b/0")
    resumed = only(ResumeGeneration, training.park_all(passed=4))
    assert resumed.because == "rank 2 lost (SIGKILL); b/2 takes over, 1 spare left"
    assert ranks(resumed.plan) == {0: "a/0", 1: "a/1", 2: "b/2", 3: "b/1"}
    assert [member.rank for member in resumed.plan.members if member.fresh] == [2]
    assert resumed.plan.restores == (Restore(rank=Rank(2), sources=(Rank(0), Rank(1), Rank(3))),)
    assert (resumed.plan.committed, resumed.plan.gate) == (Position(4), (4.0,))


def test_a_spare_starts_in_the_lost_slot_once_training_goes_on(training: CoreHarness) -> None:
    training.exits("b/0")
    training.park_all()
    assert only(StartWorker, training.resume_all()).slot == "b/0"
    assert training.view.phase == "training"


def test_where_steps_are_known_to_take_time_nothing_starts_beside_the_first_two(training: CoreHarness) -> None:
    training.tell(CostsMeasured(step_s=0.4))
    training.exits("b/0")
    training.park_all()
    calm = only(SetTimer, training.resume_all())
    training.now = calm.at_ms - 1
    assert not every(StartWorker, training.exits("a/2")), "a spare is lost, and waits too"
    assert calm.at_ms == training.now + 1 == 800
    training.now += 1
    assert {start.slot for start in every(StartWorker, training.timer("calm"))} == {"a/2", "b/0"}


def test_what_is_lost_meanwhile_starts_at_once_if_it_is_needed(training: CoreHarness) -> None:
    training.tell(CostsMeasured(step_s=60.0))
    training.exits("b/0")
    training.park_all()
    assert only(SetTimer, training.resume_all()).at_ms == 5_000, "however long a step is"
    training.exits("a/0")
    training.exits("a/1")
    assert {start.slot for start in every(StartWorker, training.park_all())} >= {"a/0"}


def test_nothing_is_decided_before_the_window_closes_and_all_have_parked(training: CoreHarness) -> None:
    training.exits("a/1")
    assert not training.parks("a/0")
    assert not training.timer("gather")
    assert not training.parks("b/0")
    plan_in(training.parks("b/1"))


def test_two_losses_in_one_window_are_one_decision(training: CoreHarness) -> None:
    training.exits("a/1")
    assert not training.exits("b/1", signal=7)
    resumed = only(ResumeGeneration, training.park_all())
    assert resumed.because == "ranks 1, 3 lost (SIGKILL, SIGBUS); a/2, b/2 take over, 0 spares left"
    assert resumed.plan.generation == 2


def test_a_survivor_lost_while_parking_needs_no_newer_generation(training: CoreHarness) -> None:
    training.exits("a/1")
    training.parks("a/0")
    training.exits("b/0")
    assert plan_in(training.park_all()).generation == 2


def test_a_loss_while_resuming_breaks_again_and_the_promoted_spare_is_fresh_once_more(training: CoreHarness) -> None:
    training.exits("a/1")
    training.park_all(passed=4)
    training.resumes("a/0")
    announced = only(BreakGeneration, training.exits("b/0"))
    assert (announced.generation, [w.slot for w in announced.workers]) == (3, ["a/0", "a/2", "b/1"])
    training.timer("gather")
    training.parks("a/2", passed=99)  # it has no state, whatever it says
    training.parks("a/0", passed=4)
    plan = plan_in(training.parks("b/1", passed=4))
    assert plan.committed == Position(4)
    assert [member.rank for member in plan.members if member.fresh] == [1, 2]
    assert {restore.sources for restore in plan.restores} == {(0, 3)}


def test_what_a_plan_committed_stays_so_when_its_witness_is_lost(training: CoreHarness) -> None:
    training.exits("a/1")
    training.timer("gather")
    training.parks("a/0", passed=5)
    training.parks("b/0", passed=4, entered=5)
    assert plan_in(training.parks("b/1", passed=4, entered=5)).committed == Position(5)
    training.exits("a/0")
    training.timer("gather")
    training.parks("a/2", passed=-1)
    training.parks("b/0", passed=4, entered=5)
    plan = plan_in(training.parks("b/1", passed=4, entered=5))
    assert (plan.committed, plan.gate) == (Position(5), (5.0,))


def test_who_does_not_park_in_time_is_fenced_and_lost(training: CoreHarness) -> None:
    training.exits("a/1")
    training.timer("gather")
    training.parks("a/0")
    training.parks("b/0")
    fenced = training.timer("park")
    assert only(FenceWorker, fenced).because == "did not park within 5000 ms"
    assert ranks(plan_in(fenced)) == {0: "a/0", 1: "a/2", 2: "b/0", 3: "b/2"}


def test_who_does_not_resume_in_time_is_fenced_and_breaks_again(training: CoreHarness) -> None:
    training.exits("a/1")
    training.park_all()
    for slot in ("a/0", "a/2", "b/0"):
        training.resumes(slot)
    late = training.timer("resume")
    assert only(FenceWorker, late).slot == "b/1"
    assert only(BreakGeneration, late).generation == 3


def test_without_a_spare_the_lost_slot_is_used_again_and_survivors_keep_their_state() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2)
    harness.train()
    harness.exits("a/1")
    started = only(StartWorker, harness.park_all())
    assert (started.slot, started.spare) == ("a/1", True)
    plan = plan_in(harness.ready("a/1"))
    assert [(member.slot, member.fresh) for member in plan.members] == [("a/0", False), ("a/1", True)]


def test_a_spare_that_still_starts_is_waited_for(rack: CoreHarness) -> None:
    for slot in rack.members:
        rack.ready(slot, "all")
    rack.exits("a/1")
    assert not every(StartWorker, rack.park_all())
    assert ranks(plan_in(rack.ready("b/2")))[Rank(1)] == "b/2"


def test_without_any_slot_left_the_job_stops_with_the_figures() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0))
    harness.join("a", 1)
    harness.join("b", 1)
    harness.train()
    harness.tray_lost("b")
    stop = stop_in(harness.park_all())
    assert stop.exit_code == 3
    assert stop.because == "rank 1 lost (b lost: lease lapsed): 1 rank to replace, 0 spares, no free slot left"
    assert stop.remedy


def test_a_spare_that_dies_costs_nothing_and_is_started_again(training: CoreHarness) -> None:
    assert only(StartWorker, training.exits("a/2")).slot == "a/2"
    assert training.view.generation == 1


def test_a_slot_that_loses_three_workers_is_quarantined(training: CoreHarness) -> None:
    training.exits("a/2", code=1)
    training.exits("a/2", code=1)
    assert not every(StartWorker, training.exits("a/2", code=1))
    assert training.view.trays[0].quarantined == ("a/2",)


def test_a_lost_tray_is_one_decision_and_its_slots_wait_when_it_comes_back() -> None:
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=2))
    for tray in ("a", "b", "c"):
        harness.join(tray, 2)
    harness.train()
    assert [spare.slot for spare in harness.view.spares] == ["c/0", "c/1"]
    harness.tray_lost("b")
    assert ranks(plan_in(harness.park_all())) == {0: "a/0", 1: "a/1", 2: "c/0", 3: "c/1"}
    harness.resume_all()
    assert [start.slot for start in every(StartWorker, harness.join("b", 2))] == ["b/0", "b/1"]


def test_ranks_of_a_lost_tray_wait_for_it_when_its_agent_is_started_again() -> None:
    """It costs seconds, and the state lives: without it there would be no slot."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0))
    for tray in ("a", "b"):
        harness.join(tray, 2)
    harness.train()
    harness.tray_lost("b", returns=True)
    assert "Waiting for b (its agent is started again)" in str(harness.park_all())
    assert [start.slot for start in every(StartWorker, harness.join("b", 2))] == ["b/0", "b/1"]
    harness.ready("b/0")
    assert ranks(plan_in(harness.ready("b/1"))) == {0: "a/0", 1: "a/1", 2: "b/0", 3: "b/1"}


def test_without_a_replica_everyone_goes_back_to_a_common_snapshot(rack: CoreHarness) -> None:
    rack.train("unique")
    who = rack.incarnation["a/1"]
    rack.exits("a/1", snapshots=[2, 4])
    resumed = only(ResumeGeneration, rack.park_all(passed=5, snapshots=[2, 4]))
    assert resumed.plan.rollback == 4
    assert resumed.plan.restores == (Restore(rank=Rank(1), snapshot=f"a:2/a/1/{who}"),)
    assert "everyone goes back to step 4, 1 steps are computed again" in resumed.because


def test_a_restore_by_which_no_step_is_computed_again_is_not_told_as_a_step_back(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.exits("a/1", snapshots=[2, 4])
    rack.timer("gather")
    answers: list[Command] = []
    for slot in rack.members:  # all stand in the phase after step 4, and a phase is computed again
        stands: dict[str, Any] = {"passed": Position(4, 1), "entered": Position(4, 1), "snapshots": (Step(2), Step(4))}
        who: dict[str, Any] = {"slot": SlotId(slot), "incarnation": rack.incarnation[slot]}
        answers += rack.tell(WorkerParked(**who, generation=Generation(rack.view.generation), gate=(4.0,), **stands))
    resumed = only(ResumeGeneration, answers)
    assert resumed.plan.rollback == 4
    assert "everyone goes on from the state after step 4" in resumed.because


def test_the_snapshots_of_a_fenced_worker_are_waited_for(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.stalls("a/1", silent=True)
    assert not rack.park_all(passed=5, snapshots=[4])
    assert plan_in(rack.exits("a/1", snapshots=[4])).rollback == 4


def test_with_a_snapshot_of_what_is_committed_nobody_goes_back(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.exits("a/1", snapshots=[2, 4])
    plan = plan_in(rack.park_all(passed=4, snapshots=[2]))
    assert (plan.committed, plan.rollback) == (Position(4), None)
    assert [(restore.rank, restore.snapshot.rpartition("/")[0]) for restore in plan.restores] == [(1, "a:2/a/1")]
    assert [member.rank for member in plan.members if member.fresh] == [1]


def test_a_phase_after_the_snapshot_may_have_changed_the_state(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.exits("a/1", snapshots=[4])
    rack.timer("gather")
    for slot in ("a/0", "b/0"):
        rack.parks(slot, 4, snapshots=[4])
    answers = rack.tell(
        WorkerParked(
            **rack._who("b/1"),
            generation=Generation(2),
            passed=Position(4, 1),
            entered=Position(4, 1),
            snapshots=(Step(4),),
        )
    )
    assert plan_in(answers).rollback == 4


def test_without_any_copy_the_job_stops_and_says_what_is_lost(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.exits("a/1")
    stop = stop_in(rack.park_all(passed=50))
    assert stop.exit_code == 3
    assert stop.because == "rank 1 lost (SIGKILL) at step 50, and no copy of its state is left"
    assert "--checkpoint-dir" in stop.remedy


def test_without_any_copy_the_world_starts_again_if_it_may() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1, start_over=True))
    harness.join("a", 3)
    harness.train("unique")
    harness.exits("a/1")
    assert len(every(FenceWorker, harness.park_all(passed=50))) == 2
    assert harness.view.phase == "restarting"


def test_a_job_that_has_just_begun_starts_again_whatever_it_has_lost(rack: CoreHarness) -> None:
    rack.train("unique")
    rack.exits("a/1")
    rack.park_all(passed=5)
    assert rack.view.phase == "restarting"


def test_when_all_are_lost_what_they_had_done_is_told_by_their_ends() -> None:
    for step, phase in ((5, "setup"), (50, "stopped")):
        harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
        harness.join("a", 2)
        harness.train()
        for slot in harness.members:
            harness.exits(slot, step=step)
        harness.park_all()
        assert harness.view.phase == phase


def test_what_a_rank_had_done_that_was_given_up_is_told_by_its_end() -> None:
    """It was silent, so it was fenced, and counted as lost before it was seen to end."""
    for step, phase in ((1, "setup"), (50, "stopped")):
        harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
        harness.join("a", 2)
        harness.train()
        harness.exits("a/0", step=step)
        harness.timer("gather")
        harness.stalls("a/1", silent=True)
        harness.exits("a/1", step=step)
        assert harness.view.phase == phase


def test_a_rollback_that_is_broken_off_is_followed_by_another(rack: CoreHarness) -> None:
    """Some members have gone back, others have not: only one more rollback makes them one again."""
    rack.train("pair")
    rack.exits("a/0", snapshots=[4])
    rack.exits("b/0", snapshots=[4])  # ranks 0 and 2 are a class: no copy is left
    assert plan_in(rack.park_all(passed=6, snapshots=[4])).rollback == 4
    rack.resumes("a/1")
    rack.exits("a/2")
    rack.timer("gather")
    rack.parks("b/2", passed=-1)
    rack.parks("a/1", passed=4, snapshots=[4])
    rack.parks("b/1", passed=6, snapshots=[4])
    plan = plan_in(rack.ready("a/2"))
    assert plan.rollback == 4
    assert {restore.rank for restore in plan.restores} == {0, 2}


def test_a_member_that_may_be_half_gone_back_is_no_source(rack: CoreHarness) -> None:
    """What it reports is the step that is committed now, and still its memory is not to be trusted."""
    rack.train("pair")
    rack.exits("a/0", snapshots=[4])
    rack.exits("b/0", snapshots=[4])
    assert plan_in(rack.park_all(passed=5, snapshots=[4])).rollback == 4
    for slot in ("a/2", "b/2"):
        rack.resumes(slot)
    rack.exits("a/1", snapshots=[4])
    rack.timer("gather")
    rack.parks("a/2", passed=4)
    rack.parks("b/2", passed=4)
    rack.parks("b/1", passed=4, snapshots=[4])
    plan = plan_in(rack.ready("a/1"))
    assert plan.rollback == 4
    assert all(restore.snapshot and not restore.sources for restore in plan.restores)


def test_after_a_rollback_the_next_verdict_starts_from_there(rack: CoreHarness) -> None:
    rack.train("pair")
    rack.exits("a/0", snapshots=[4])
    rack.exits("b/0", snapshots=[4])
    assert plan_in(rack.park_all(passed=6, snapshots=[4])).committed == Position(6)
    rack.resume_all()
    rack.exits("b/1")
    rack.ready("a/0")
    plan = plan_in(rack.park_all(passed=5))
    assert (plan.committed, plan.rollback) == (Position(5), None)


def test_a_lost_snapshot_that_is_being_restored_makes_another_plan_at_once() -> None:
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=1))
    for tray in ("a", "b", "c"):
        harness.join(tray, 1)
    harness.train("unique")
    harness.exits("b/0", snapshots=[4])
    assert plan_in(harness.park_all(passed=5, snapshots=[4])).rollback == 4
    broken = only(BreakGeneration, harness.tray_lost("b"))
    assert broken.because == "b lost, with the snapshots that rank 1 would have restored"


# -- copies on other trays ---------------------------------------------------------------------------------------------
def three_trays() -> CoreHarness:
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=2))
    for tray in ("a", "b", "c"):
        harness.join(tray, 2)
    harness.train("unique")
    return harness


def test_a_plan_says_where_each_trays_copies_go() -> None:
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=2))
    for tray in ("a", "b", "c"):
        harness.join(tray, 2)
    first = only(ResumeGeneration, harness.answers)
    assert first.plan.mirrors == {"a": "b:2/b", "b": "c:2/c", "c": "a:2/a"}


def test_one_tray_has_nowhere_to_copy_to() -> None:
    alone = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    alone.join("a", 2)
    assert only(ResumeGeneration, alone.answers).plan.mirrors == {}


def test_the_shards_of_a_lost_tray_come_from_its_holder() -> None:
    harness = three_trays()
    for slot in ("b/0", "b/1"):
        harness.mirrors(slot, "c", 2, 4)
    harness.tray_lost("b")
    plan = plan_in(harness.park_all(passed=5, snapshots=[4]))
    assert plan.rollback == 4
    assert {restore.rank: restore.snapshot.rpartition("/")[0] for restore in plan.restores} == {
        2: "c:2/b/0",
        3: "c:2/b/1",
    }
    assert plan.mirrors == {"a": "c:2/c", "c": "a:2/a"}


def test_copies_that_are_told_of_when_their_worker_is_condemned_already_count() -> None:
    """They outlive it. Its own tray may be lost with what it leaves there."""
    harness = three_trays()
    harness.mirrors("b/1", "c", 2, 4)
    harness.exits("b/1", snapshots=(2, 4))
    harness.timer("gather")
    for slot in ("a/0", "a/1"):
        harness.parks(slot, passed=5, snapshots=(2, 4))
    assert not every(FenceWorker, harness.timer("park")), "its tray may stand still, and be back within its lease"
    condemned = harness.timer("park")
    assert [fence.slot for fence in every(FenceWorker, condemned)] == ["b/0"]
    assert not every(ResumeGeneration, condemned), "what it leaves is waited for"
    harness.mirrors("b/0", "c", 2, 4, generation=1)
    plan = plan_in(harness.tray_lost("b"))
    assert plan.rollback == 4
    assert [restore.snapshot.rpartition("/")[0] for restore in plan.restores] == ["c:2/b/0", "c:2/b/1"]


def test_a_slots_last_two_workers_leave_snapshots_and_older_ones_are_forgotten_as_the_agent_forgets_them() -> None:
    kept = SnapshotLocations()
    for incarnation in (1, 2, 3):
        event = WorkerExited(
            slot=SlotId("a/0"),
            incarnation=Incarnation(incarnation),
            exit_code=None,
            signal=9,
            snapshots=(Step(incarnation),),
        )
        kept.left(Rank(incarnation % 2), event, "a:2", event.snapshots)
    left = {rank: [one.incarnation for one in holders] for rank, holders in kept.by_rank().items()}
    assert left == {Rank(0): [2], Rank(1): [3]}


def test_survivors_that_have_gone_on_go_back_to_their_own_copies_too() -> None:
    """Their last two snapshots are newer than the newest that is on another tray for everybody."""
    harness = three_trays()
    for slot in ("a/0", "a/1"):
        harness.mirrors(slot, "b", 2, 4)
    for slot in ("b/0", "b/1"):
        harness.mirrors(slot, "c", 2)
    harness.tray_lost("b")  # with its workers, and with the copies of a's
    assert len(every(FenceWorker, harness.park_all(passed=9, snapshots=[6, 8]))) == 4, (
        "no step is left that everybody has"
    )
    harness = three_trays()
    for slot in ("a/0", "a/1", "b/0", "b/1"):
        harness.mirrors(slot, "c", 2)
    harness.tray_lost("b")
    plan = plan_in(harness.park_all(passed=9, snapshots=[6, 8]))
    assert plan.rollback == 2
    assert sorted(restore.rank for restore in plan.restores) == [0, 1, 2, 3]


def test_a_holder_that_is_lost_while_it_is_read_makes_another_plan_at_once() -> None:
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=2))
    for tray in ("a", "b", "c", "d"):
        harness.join(tray, 1 if tray < "c" else 2)
    harness.train("unique")
    lost, holder = harness.members[1], "c"
    harness.mirrors(lost, holder, 4)
    harness.tray_lost(lost.partition("/")[0])
    plan = plan_in(harness.park_all(passed=4, snapshots=[4]))
    assert [restore.snapshot.partition(":")[0] for restore in plan.restores] == [holder]
    only(BreakGeneration, harness.tray_lost(holder))


def test_a_damaged_snapshot_of_a_survivor_is_replaced_by_its_copy_on_another_tray() -> None:
    harness = three_trays()
    for slot in ("a/0", "b/0", "b/1"):
        harness.mirrors(slot, "c", 2, 4)
    harness.tray_lost("b")
    assert plan_in(harness.park_all(passed=5, snapshots=[2, 4])).rollback == 4
    only(BreakGeneration, harness.finds_damaged("a/0", 4))
    harness.parks("a/0", 5, snapshots=[2])
    plan = plan_in(harness.park_all(passed=5, snapshots=[2, 4]))
    assert plan.rollback == 4
    assert {r.rank: r.snapshot.rpartition("/")[0] for r in plan.restores}[Rank(0)] == "c:2/a/0"


def test_a_damaged_copy_is_not_tried_again_and_all_go_back_to_the_older_step() -> None:
    harness = three_trays()
    for slot in ("b/0", "b/1"):
        harness.mirrors(slot, "c", 2, 4)
    harness.tray_lost("b")
    plan = plan_in(harness.park_all(passed=5, snapshots=[2, 4]))
    (bad,) = [r.snapshot for r in plan.restores if r.rank == 2]
    only(BreakGeneration, harness.finds_damaged(ranks(plan)[Rank(2)], 4, bad))
    plan = plan_in(harness.park_all(passed=5, snapshots=[2, 4]))
    assert plan.rollback == 2


def test_a_damage_that_is_told_late_is_remembered_but_breaks_nothing(rack: CoreHarness) -> None:
    rack.train("unique")
    assert not rack.finds_damaged(rack.members[0], 4)
    assert rack.view.phase == "training"


def test_a_copy_that_is_told_of_late_is_of_a_history_that_has_ended() -> None:
    """Its step 4 was pushed before all went back to 2; the step 4 that is done since may have other bits."""
    harness = three_trays()
    harness.mirrors("b/0", "c", 2)
    harness.mirrors("b/1", "c", 2)
    harness.mirrors("a/0", "b", 2)
    harness.exits("a/1", snapshots=[2])
    assert plan_in(harness.park_all(passed=4, snapshots=[2])).rollback == 2
    harness.mirrors("b/0", "c", 2, 4, generation=1)
    harness.resume_all()
    harness.exits("b/0")
    plan = plan_in(harness.park_all(passed=4, snapshots=[2, 4]))
    assert plan.rollback == 2


def test_the_workers_own_tray_is_asked_first() -> None:
    harness = three_trays()
    who = harness.incarnation["b/0"]
    harness.mirrors("b/0", "c", 4)
    harness.exits("b/0", snapshots=[4])
    plan = plan_in(harness.park_all(passed=5, snapshots=[4]))
    assert [restore.snapshot for restore in plan.restores] == [f"b:2/b/0/{who}"]


def test_recoveries_without_progress_end_the_job() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1, no_progress_max=2))
    harness.join("a", 3)
    harness.train()
    for number in range(3):
        harness.exits(harness.members[1], step=number)
        spare = harness.view.spares[0]
        if spare.state == "starting":
            harness.ready(spare.slot)
        answers = harness.park_all(passed=4)
        if every(StopJob, answers):
            break
        harness.resume_all()
    assert stop_in(answers).because == "2 recoveries without one committed step: rank 1 lost (SIGKILL)"
    assert number == 2


def test_what_old_incarnations_generations_and_trays_say_is_ignored(training: CoreHarness) -> None:
    old = training.incarnation["a/1"]
    training.exits("a/1")
    training.park_all()
    training.resume_all()
    worker: dict[str, Any] = {"slot": SlotId("a/1"), "incarnation": old}
    for event in (
        WorkerExited(**worker, signal=9),
        WorkerResumed(**worker, generation=Generation(2)),
        WorkerParked(**worker, generation=Generation(2)),
        WorkerParked(slot=SlotId("a/0"), incarnation=training.incarnation["a/0"], generation=Generation(2)),
        WorkerExited(slot=SlotId("z/9"), incarnation=Incarnation(1), signal=9),
    ):
        assert not training.tell(event)
    assert not training.tray_lost("z")


# -- stalls ------------------------------------------------------------------------------------------------------------
def test_a_silent_worker_is_fenced_at_once(training: CoreHarness) -> None:
    answers = training.stalls("b/0", silent=True)
    assert only(FenceWorker, answers).because == "silent for 700 ms at step 5"
    assert only(BreakGeneration, answers).because == "rank 2 lost (silent for 700 ms at step 5)"


def test_the_lowest_collective_is_to_blame_once_all_have_reported(training: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/1"):
        training.stalls(slot, 11)
    assert [str(timer.timer) for timer in every(SetTimer, training.timer("stalled"))] == ["judge:1"]
    fenced = only(FenceWorker, training.stalls("b/0", 10))
    assert (fenced.slot, fenced.because) == (
        "b/0",
        "stalled at collective 10, others wait at 11 (4 of 4 ranks report)",
    )


def test_after_a_second_window_those_that_report_are_judged(training: CoreHarness) -> None:
    training.stalls("a/0", 11)
    training.stalls("b/0", 10)
    training.timer("stalled")
    assert only(FenceWorker, training.timer("judge")).slot == "b/0"


def test_if_all_stand_at_one_collective_the_step_is_done_again_in_place(training: CoreHarness) -> None:
    for slot in training.members:
        training.stalls(slot, 11)
    announced = only(BreakGeneration, training.timer("stalled"))
    assert len(announced.workers) == 4
    plan = plan_in(training.park_all(passed=4))
    assert not plan.restores
    assert not any(member.fresh for member in plan.members)


def test_a_rank_that_returned_early_is_named_when_the_others_stall(training: CoreHarness) -> None:
    training.finishes("a/1")
    for slot in ("a/0", "b/0", "b/1"):
        training.stalls(slot, 11)
    training.timer("stalled")
    stop = only(StopJob, training.timer("judge"))
    assert stop.exit_code == 1
    assert stop.because == "rank 1 returned from main, while ranks 0, 2, 3 wait in a step for all ranks"


def test_late_newcomers_are_fenced_and_not_those_that_give_them_their_state(training: CoreHarness) -> None:
    training.exits("b/0")
    training.park_all(passed=4)
    assert [fenced.slot for fenced in every(FenceWorker, training.timer("resume"))] == ["b/2"]


def test_three_absorbs_without_progress_are_enough(training: CoreHarness) -> None:
    answers: list[object] = []
    for _ in range(4):
        for slot in training.members:
            training.stalls(slot, 11)
        training.timer("stalled")
        answers = list(training.park_all(passed=4))
        if not every(StopJob, answers):  # type: ignore[arg-type]
            training.resume_all()
    stop = only(StopJob, answers)  # type: ignore[arg-type]
    assert stop.exit_code == 3
    assert "done again 3 times" in stop.because


# -- broken connections ------------------------------------------------------------------------------------------------
def test_a_broken_connection_between_living_ranks_repeats_the_step_in_place(training: CoreHarness) -> None:
    announced = only(BreakGeneration, training.is_severed("b/0"))
    assert announced.because == "a collective broke on rank 2 (connection reset)"
    assert len(announced.workers) == 4
    assert not training.is_severed("b/1", generation=1), "the same break, seen from its other end"
    plan = plan_in(training.park_all(passed=4))
    assert not plan.restores
    assert not any(member.fresh for member in plan.members)


def test_a_connection_that_breaks_while_others_resume_breaks_again(training: CoreHarness) -> None:
    training.is_severed("b/0")
    training.park_all(passed=4)
    training.resumes("a/0")
    assert only(BreakGeneration, training.is_severed("a/0")).generation == 3


def test_whoever_does_not_park_after_a_broken_connection_was_lost(training: CoreHarness) -> None:
    training.is_severed("b/0")
    training.timer("gather")
    for slot in ("a/0", "a/1", "b/0"):
        training.parks(slot)
    assert only(FenceWorker, training.timer("park")).slot == "b/1"


def test_a_stalled_spare_is_fenced_and_started_again(training: CoreHarness) -> None:
    assert only(FenceWorker, training.stalls("a/2")).slot == "a/2"
    assert only(StartWorker, training.exits("a/2")).slot == "a/2"
    assert training.view.generation == 1


def test_what_rackrun_itself_refuses_is_the_scripts_at_once(training: CoreHarness) -> None:
    failure = ScriptFailure(type="rackrun.errors.StepError", message="no", traceback="", where="train.py:1")
    event = WorkerExited(**training._who("b/0"), failure=failure, exit_code=1, step=Step(5))
    stop = only(StopJob, training.tell(event))
    assert stop.exit_code == 1
    assert "broke a rule" in stop.because


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no", "broke a rule, at /a/train.py:1: no"),
        ("train.py:1: no", "broke a rule, at train.py:1: no"),
        ("/a/train.py:1: no", "broke a rule, at /a/train.py:1: no"),
        ("train.py:7: no", "broke a rule, at /a/train.py:1: train.py:7: no"),
    ],
)
def test_the_line_of_a_broken_rule_is_told_once(message: str, told: str, training: CoreHarness) -> None:
    failure = ScriptFailure(type="rackrun.errors.StepError", message=message, traceback="", where="/a/train.py:1")
    event = WorkerExited(**training._who("b/0"), failure=failure, exit_code=1, step=Step(5))
    assert only(StopJob, training.tell(event)).because.endswith(told)


def test_an_error_of_rackruns_own_has_one_remedy_and_it_is_that_of_the_error(training: CoreHarness) -> None:
    failure = ScriptFailure(
        type="rackrun.errors.UsageError", message="no. Remedy: this.", traceback="", where="train.py:1"
    )
    event = WorkerExited(**training._who("b/0"), failure=failure, exit_code=1, step=Step(5))
    stop = only(StopJob, training.tell(event))
    assert (stop.because.count("Remedy"), stop.remedy) == (1, "")


def test_a_refused_directory_is_told_without_a_line_of_the_script(training: CoreHarness) -> None:
    message = "/c/run is in use by another job. Remedy: end it."
    failure = ScriptFailure(type="rackrun.errors.DirectoryRefused", message=message, traceback="", where="train.py:1")
    event = WorkerExited(**training._who("b/0"), failure=failure, exit_code=1, step=Step(-1))
    stop = only(StopJob, training.tell(event))
    assert (stop.exit_code, stop.because, stop.remedy) == (1, message, "")


# -- whose error -------------------------------------------------------------------------------------------------------
def test_the_first_error_of_a_script_is_taken_for_the_hardwares(training: CoreHarness) -> None:
    assert every(BreakGeneration, training.exits("a/1", code=1, bug="train.py:7"))


def test_the_same_error_at_the_same_step_elsewhere_is_the_scripts(training: CoreHarness) -> None:
    training.exits("a/1", code=1, bug="train.py:7")
    training.now = 1000
    training.park_all()
    training.resume_all()
    stop = stop_in(training.exits("a/2", code=1, bug="train.py:7"))
    assert (stop.exit_code, stop.rank) == (1, 1)
    assert stop.failure is not None
    assert (
        stop.because == "builtins.ValueError at train.py:7 on rank 1 at step 5, as on rank 1 before: not the hardware's"
    )


def test_replacements_that_fail_alike_in_their_first_steps_are_the_scripts(training: CoreHarness) -> None:
    training.exits("a/1", signal=9)
    for attempt in range(3):
        training.park_all(passed=4 + attempt)
        training.resume_all()
        assert training.view.phase == "training"
        training.now += 10_000
        for spare in training.view.spares:
            training.ready(spare.slot)
        answers = training.exits(training.members[1], code=1, bug="train.py:7", step=5 + attempt)
    stop = stop_in(answers)
    assert stop.exit_code == 1
    assert stop.because == (
        "builtins.ValueError at train.py:7 on rank 1 at step 7: 3 replacements failed so, each in its first step: not the hardware's"
    )


def test_first_steps_of_replacements_with_training_between_them_are_not_counted_together(training: CoreHarness) -> None:
    training.exits("a/1", signal=9)
    for attempt in range(4):
        training.park_all(passed=4 + 10 * attempt)
        training.resume_all()
        training.now += 10_000
        for spare in training.view.spares:
            training.ready(spare.slot)
        assert not every(StopJob, training.exits(training.members[1], code=1, bug="train.py:7", step=5 + 10 * attempt))


def test_an_error_that_a_replacement_makes_later_is_taken_for_the_hardwares(training: CoreHarness) -> None:
    training.exits("a/1", signal=9)
    for attempt in range(2):
        training.park_all(passed=4 + attempt)
        training.resume_all()
        training.now += 10_000
        assert not every(StopJob, training.exits(training.members[1], code=1, bug="train.py:7", step=9 + attempt))


def test_the_same_error_before_the_first_step_is_not_at_step_minus_1(training: CoreHarness) -> None:
    training.exits("a/1", code=1, bug="train.py:7", step=-1)
    training.now = 1000
    training.park_all()
    training.resume_all()
    stop = stop_in(training.exits("a/2", code=1, bug="train.py:7", step=-1))
    assert "on rank 1 before the first step, as on rank 1 before" in stop.because


def test_a_process_that_aborts_itself_twice_is_told_what_gloo_does(training: CoreHarness) -> None:
    training.exits("a/1", signal=6)
    training.now = 1000
    training.park_all()
    training.resume_all()
    stop = stop_in(training.exits("a/2", signal=6))
    assert stop.because == "SIGABRT on rank 1 at step 5, as on rank 1 before: not the hardware's"
    assert "a collective that not every rank calls" in stop.remedy


def test_two_members_that_raise_the_same_in_one_window_are_the_scripts(training: CoreHarness) -> None:
    training.exits("a/1", code=1, bug="train.py:7", step=5)
    training.now = 4
    assert stop_in(training.exits("b/1", code=1, bug="train.py:7", step=6)).exit_code == 1


@pytest.mark.parametrize("signal", [4, 6, 7, 8, 11])
def test_a_crash_twice_at_one_step_is_the_scripts(training: CoreHarness, signal: int) -> None:
    training.exits("a/1", signal=signal)
    assert stop_in(training.exits("b/1", signal=signal)).exit_code == 1


def test_a_kill_is_always_the_hardwares(training: CoreHarness) -> None:
    training.exits("a/1", signal=9)
    assert not every(StopJob, training.exits("b/1", signal=9))


def test_to_leave_before_the_end_is_an_error_of_the_script(training: CoreHarness) -> None:
    announced = only(BreakGeneration, training.exits("a/1", code=0))
    assert announced.because == "rank 1 lost (exited with code 0 before training was finished)"
