"""What is done about a GPU that is judged: fenced now, replaced between two steps, kept out of use, or left."""

from __future__ import annotations

import pytest

from rackrun.core.faults.triage import SELF_EXIT_MS
from rackrun.protocol.commands import (
    BreakGeneration,
    Notice,
    PauseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import BreakerClosed, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Position
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import CoreHarness, condemned, every, only, only_condemned, plan_in, stop_in


@pytest.fixture
def one_clique() -> CoreHarness:
    """Four trays of two GPUs in one clique; ranks 0 to 5 on a, b, c; d waits."""
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=2))
    for tray in "abcd":
        harness.join(tray, 2, clique="x")
    harness.train()
    assert [spare.slot for spare in harness.view.spares] == ["d/0", "d/1"]
    return harness


# -- fence -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("health", [Health.LOST, Health.RESET, Health.DRAIN_P2P])
def test_a_gpu_beyond_use_costs_its_rank_at_once_and_the_report_has_the_reason(
    one_clique: CoreHarness, health: Health
) -> None:
    answers = one_clique.judges("b/1", health)
    fenced = only_condemned(answers)
    assert (fenced.slot, fenced.because) == ("b/1", f"GPU 1 is {health.value}: it was tested (nvml)")
    assert only(BreakGeneration, answers).because == f"rank 3 lost ({fenced.because})"
    plan = plan_in(one_clique.park_all())
    assert plan.members[3].slot in ("d/0", "d/1")


def test_nothing_is_started_on_that_gpu_until_it_is_well_again(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.LOST)
    one_clique.park_all()
    one_clique.exits("b/1")
    assert not every(StartWorker, one_clique.resume_all())
    assert only(StartWorker, one_clique.judges("b/1", Health.OK)).slot == "b/1"


def test_a_tray_to_be_rebooted_loses_all_its_ranks_in_one_decision(one_clique: CoreHarness) -> None:
    answers = one_clique.judges("b/0", Health.REBOOT)
    assert [fenced.slot for fenced in condemned(answers)] == ["b/0", "b/1"]
    plan = plan_in(one_clique.park_all())
    assert {plan.members[2].slot, plan.members[3].slot} == {"d/0", "d/1"}


def test_a_spare_on_a_gpu_beyond_use_goes_quietly(one_clique: CoreHarness) -> None:
    answers = one_clique.judges("d/0", Health.LOST)
    assert only_condemned(answers).slot == "d/0"
    assert not every(BreakGeneration, answers)
    assert one_clique.view.phase == "training"


def test_a_process_that_lost_its_context_has_a_moment_to_say_so_itself(one_clique: CoreHarness) -> None:
    answers = one_clique.judges("a/0", Health.APP)
    assert not condemned(answers)
    timer = next(timer for timer in every(SetTimer, answers) if str(timer.timer).startswith("failed:a/0:"))
    assert timer.at_ms == one_clique.now + SELF_EXIT_MS
    one_clique.exits("a/0", bug="train.py:3")
    assert not one_clique.tell(TimerFired(timer=timer.timer))


def test_a_process_that_lost_its_context_is_replaced_and_its_gpu_waits_as_a_spare(one_clique: CoreHarness) -> None:
    (timer,) = every(SetTimer, one_clique.judges("a/0", Health.APP))
    assert only_condemned(one_clique.tell(TimerFired(timer=timer.timer))).slot == "a/0"
    one_clique.park_all()
    one_clique.exits("a/0")
    assert only(StartWorker, one_clique.resume_all()).slot == "a/0"


# -- a planned swap --------------------------------------------------------------------------------------------------
def test_a_failing_gpu_is_left_at_a_step_boundary_with_no_step_done_again(one_clique: CoreHarness) -> None:
    answers = one_clique.judges("b/1", Health.DEGRADED)
    pause = only(PauseWorkers, answers)
    assert len(pause.workers) == 6
    assert not condemned(answers)
    assert any("planned swap" in notice.text and "rank 3" in notice.text for notice in every(Notice, answers))
    paused = one_clique.pause_all()
    assert only_condemned(paused).slot == "b/1"
    plan = plan_in(one_clique.park_all(passed=7))
    assert (plan.committed, plan.rollback) == (Position(7), None)
    assert plan.members[3].slot in ("d/0", "d/1")
    assert [restore.rank for restore in plan.restores] == [3]


def test_a_shard_of_its_own_comes_from_the_snapshot_of_exactly_that_step(one_clique: CoreHarness) -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 2, clique="x")
    harness.join("b", 2, clique="x")
    harness.train(classes="unique")
    victim = harness.view.ranks[0].slot
    harness.judges(victim, Health.DEGRADED)
    harness.pause_all()
    harness.timer("gather")
    for rank in harness.view.ranks:
        if rank.state == "breaking":
            harness.parks(rank.slot, 7, snapshots=(5, 7))
    assert harness.view.phase == "parking", "what the fenced worker leaves is worth waiting for"
    plan = plan_in(harness.exits(victim, snapshots=(5, 7)))
    assert (plan.committed, plan.rollback) == (Position(7), None)
    assert plan.restores[0].snapshot.startswith(f"{victim[0]}:2/{victim}/")


def test_nothing_happens_before_all_have_paused(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    for slot in one_clique.members[:-1]:
        assert not one_clique.pauses(slot)


def test_without_a_better_gpu_the_rank_stays_and_is_swapped_when_one_is_ready(one_clique: CoreHarness) -> None:
    one_clique.judges("d/0", Health.LOST)
    one_clique.judges("d/1", Health.DEGRADED)
    assert not every(PauseWorkers, one_clique.judges("b/1", Health.DEGRADED))
    assert every(PauseWorkers, one_clique.judges("d/1", Health.OK))


def test_a_spare_that_may_not_be_used_does_not_count(one_clique: CoreHarness) -> None:
    for spare in ("d/0", "d/1"):
        one_clique.checks(spare, "its fabric registration is in progress, not completed")
    assert not every(PauseWorkers, one_clique.judges("b/1", Health.DEGRADED))
    assert every(PauseWorkers, one_clique.checks("d/0"))


def test_a_gpu_on_its_way_out_is_the_last_choice_but_a_choice(one_clique: CoreHarness) -> None:
    one_clique.judges("d/0", Health.DEGRADED)
    one_clique.exits("a/0")
    assert plan_in(one_clique.park_all()).members[0].slot == "d/1"
    one_clique.resume_all()
    one_clique.exits("a/1")
    assert plan_in(one_clique.park_all()).members[1].slot == "d/0"


def test_a_loss_in_the_middle_of_the_pause_is_recovered_and_the_swap_comes_after(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    one_clique.pauses("a/0")
    only(BreakGeneration, one_clique.exits("c/0"))
    one_clique.park_all()
    again = one_clique.resume_all()
    assert only(PauseWorkers, again).generation == 2


def test_a_pause_that_takes_too_long_is_not_waited_for(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    one_clique.pauses("a/0")
    assert only_condemned(one_clique.timer("pause")).slot == "b/1"


def test_a_pause_whose_reason_is_gone_ends_without_any_loss(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    one_clique.judges("b/1", Health.OK)
    paused = one_clique.pause_all()
    assert not condemned(paused)
    assert "called off" in only(BreakGeneration, paused).because
    plan = plan_in(one_clique.park_all(passed=7))
    assert not plan.restores


def test_a_gpu_that_dies_while_its_swap_is_planned_is_fenced_at_once(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    assert only_condemned(one_clique.judges("b/1", Health.LOST)).slot == "b/1"


def test_a_job_that_ends_swaps_nothing(one_clique: CoreHarness) -> None:
    one_clique.finishes("a/0")
    assert not every(PauseWorkers, one_clique.judges("b/1", Health.DEGRADED))


# -- the breaker -----------------------------------------------------------------------------------------------------
def test_fabric_trouble_waits_a_moment_and_then_costs_its_rank(one_clique: CoreHarness) -> None:
    waiting = one_clique.judges("b/1", Health.FABRIC, fabric=True)
    assert not condemned(waiting)
    one_clique.now += 10_000
    assert only_condemned(one_clique.tell(TimerFired(timer=timer_named("breaker")))).slot == "b/1"


def test_fabric_trouble_on_several_trays_is_the_switch_and_nobody_is_taken_out(one_clique: CoreHarness) -> None:
    one_clique.judges("a/0", Health.FABRIC, fabric=True)
    answers = one_clique.judges("b/0", Health.FABRIC, fabric=True)
    assert not condemned(answers)
    assert any("a switch or the fabric manager" in notice.text for notice in every(Notice, answers))
    one_clique.now += 10_000
    assert not condemned(one_clique.tell(TimerFired(timer=timer_named("breaker"))))


def test_more_than_half_of_the_trays_are_never_taken_out_at_once(one_clique: CoreHarness) -> None:
    for tray in "ab":
        assert condemned(one_clique.judges(f"{tray}/0", Health.RESET))
    answers = one_clique.judges("c/0", Health.RESET)
    assert not condemned(answers)
    assert "until a person has looked" in only(Notice, answers).text


def test_a_person_who_has_looked_closes_the_breaker_and_what_was_held_back_is_done(one_clique: CoreHarness) -> None:
    one_clique.judges("a/0", Health.FABRIC, fabric=True)
    one_clique.judges("b/0", Health.FABRIC, fabric=True)
    answers = one_clique.tell(BreakerClosed())
    assert {fenced.slot for fenced in condemned(answers)} == {"a/0", "b/0"}
    assert "2 verdicts were held back" in every(Notice, answers)[0].text
    one_clique.park_all()
    assert not condemned(one_clique.tell(BreakerClosed())), "once"


# -- before and after training ---------------------------------------------------------------------------------------
def test_before_the_first_step_the_world_begins_again_elsewhere() -> None:
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=1))
    for tray in "abc":
        harness.join(tray, 1, clique="x")
    harness.elastic("a/0")
    fenced = [command.slot for command in condemned(harness.judges("a/0", Health.LOST))]
    assert set(fenced) == {"a/0", "b/0"}
    for slot in fenced:
        harness.exits(slot)
    plan = every(ResumeGeneration, harness.answers)[-1].plan
    assert {member.slot for member in plan.members} == {"b/0", "c/0"}


def test_with_no_slot_left_that_may_be_used_the_job_stops_with_the_reason() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0))
    harness.join("a", 1, clique="x")
    harness.join("b", 1, clique="x")
    harness.train()
    harness.judges("a/0", Health.LOST)
    harness.park_all()
    stop = only(StopJob, harness.exits("a/0")) if harness.view.phase != "stopped" else stop_in(harness.answers)
    assert stop.exit_code == 3
    assert "GPU 0 is lost" in stop.because


def test_a_tray_that_comes_back_is_asked_anew(one_clique: CoreHarness) -> None:
    one_clique.judges("d/0", Health.LOST)
    one_clique.tray_lost("d")
    joined = one_clique.join("d", 2, clique="x")
    assert {start.slot for start in every(StartWorker, joined)} == {"d/0", "d/1"}


# -- GPUs that are not fit now ---------------------------------------------------------------------------------------
def test_who_is_lost_begins_again_in_its_own_slot_when_the_only_spare_may_not_be_used(one_clique: CoreHarness) -> None:
    for spare in ("d/0", "d/1"):
        one_clique.checks(spare, "its fabric registration is in progress")
    one_clique.exits("a/0")
    assert only(StartWorker, one_clique.park_all()).slot == "a/0"


def test_when_only_unfit_gpus_can_help_they_are_waited_for_and_named() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2, clique="x")
    harness.train()
    harness.checks("a/0", "its driver does not answer")
    harness.exits("a/0")
    waiting = only(Notice, harness.park_all())
    assert waiting.text == "rank 0 lost (SIGKILL): 1 ranks to replace. Waiting for a/0 (its driver does not answer)"
    assert only(StartWorker, harness.checks("a/0")).slot == "a/0"


def test_a_wait_for_unfit_gpus_that_takes_too_long_ends_with_their_reasons() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2, clique="x")
    harness.train()
    harness.checks("a/0", "its driver does not answer")
    harness.exits("a/0")
    harness.park_all()
    assert "a/0 (its driver does not answer)" in stop_in(harness.timer("recover")).because


def test_a_world_that_begins_again_waits_for_unfit_gpus() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2, clique="x")
    harness.checks("a/1", "its driver does not answer")
    harness.exits("a/0")
    waiting = only(Notice, harness.exits("a/1"))
    assert waiting.text == "2 ranks need a slot. Waiting for a/1 (its driver does not answer)"
    assert len(every(StartWorker, harness.checks("a/1"))) == 2


def test_a_world_that_cannot_begin_again_says_what_is_against_the_slots() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2, clique="x")
    harness.checks("a/1", "its driver does not answer")
    harness.exits("a/0")
    harness.exits("a/1")
    assert "a/1: its driver does not answer" in stop_in(harness.timer("exits")).because


def test_a_job_begins_when_its_gpus_have_become_fit() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    waiting = only(Notice, harness.join("a", 2, clique="x", unfit={1: "its fabric registration is in progress"}))
    assert waiting.text.startswith("2 ranks need a slot, but only 1 fit in 1 usable slots")
    assert waiting.text.endswith("Waiting for a/1 (its fabric registration is in progress)")
    assert len(every(StartWorker, harness.checks("a/1"))) == 2


def test_a_job_whose_gpus_never_become_fit_ends_with_the_reason() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2, clique="x", unfit={1: "its fabric registration is in progress"})
    stop = stop_in(harness.tell(TimerFired(timer=timer_named("fit"))))
    assert (stop.exit_code, "a/1 (its fabric registration is in progress)" in stop.because) == (3, True)


def test_a_free_slot_of_the_clique_is_used_before_the_job_is_given_up() -> None:
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, mesh=(("dp", 2), ("tp", 3)), spares=0))
    for tray in "abcd":
        harness.join(tray, 2, clique="x" if tray in "ab" else "y")
    harness.train()
    assert [spare.slot for spare in harness.view.spares] == ["b/1", "d/1"]
    harness.judges("a/0", Health.LOST)
    harness.exits("b/1")
    assert only(StartWorker, harness.park_all()).slot == "b/1"


def test_a_slot_that_lost_many_workers_is_the_last_choice_of_a_world_that_begins_again() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0, max_restarts=10))
    harness.join("a", 2, clique="x")
    for _ in range(6):
        harness.exits("a/0", code=1)
        harness.exits("a/1")
    assert harness.view.phase == "setup"


# -- verdicts before the world is formed, and of trays that are gone ---------------------------------------------------
def test_what_trays_say_before_all_have_joined_does_not_open_the_breaker() -> None:
    harness = CoreHarness(JobConfig(trays_min=8, trays_max=8, spares=8))
    for tray in "abcdefgh":
        harness.join(tray, 2, clique="x")
        if tray in "abc":
            harness.judges(f"{tray}/0", Health.DEGRADED)
    assert not any("until a person has looked" in notice.text for notice in every(Notice, harness.answers))
    assert not {"a/0", "b/0", "c/0"} & {rank.slot for rank in harness.view.ranks}


def test_a_verdict_that_waits_is_forgotten_with_its_tray(one_clique: CoreHarness) -> None:
    one_clique.judges("d/0", Health.FABRIC, fabric=True)
    one_clique.tray_lost("d")
    one_clique.join("d", 2, clique="x")
    one_clique.now += 10_000
    one_clique.tell(TimerFired(timer=timer_named("breaker")))
    assert [spare.slot for spare in one_clique.view.spares] == ["d/0", "d/1"]


def test_a_pause_that_no_rank_has_heard_before_its_end_costs_nobody(one_clique: CoreHarness) -> None:
    one_clique.judges("b/1", Health.DEGRADED)
    for slot in one_clique.members[:-1]:
        one_clique.finishes(slot)
    assert not one_clique.timer("pause"), "the last one writes its model"


def test_after_the_end_nothing_more_is_said_of_the_hardware() -> None:
    """The first verdict that was held back ends the job, whose ranks have not computed a step; the second is of no use any more."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, max_restarts=0))
    harness.join("a", 1, clique="x")
    harness.join("b", 1, clique="x")
    harness.judges("a/0", Health.FABRIC, fabric=True)
    harness.judges("b/0", Health.FABRIC, fabric=True)
    assert isinstance(harness.tell(BreakerClosed())[-1], StopJob)
