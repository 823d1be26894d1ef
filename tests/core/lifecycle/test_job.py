"""The rules around training: forming, setup, restarts, the end."""

from __future__ import annotations

from typing import Any

import pytest

from rackrun.protocol.commands import (
    BreakGeneration,
    DrainWorkers,
    FenceWorker,
    ReleaseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import JournalFailed, ScriptFailure, StopRequested, TimerFired
from rackrun.protocol.ids import BEGIN
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks, stop_in


def config(**fields: Any) -> JobConfig:
    return JobConfig(**{"trays_min": 1, "trays_max": 1, "spares": 0} | fields)


def stop_request(code: int = 130) -> StopRequested:
    return StopRequested(because="Ctrl-C", exit_code=code)


# -- forming -----------------------------------------------------------------------------------------------------------
def test_the_world_forms_when_all_trays_have_joined_and_the_plan_goes_first() -> None:
    harness = CoreHarness(config(trays_min=2, trays_max=2, spares=1))
    assert not every(StartWorker, harness.join("tray-10", 2))
    formed = harness.join("tray-2", 2)
    assert isinstance(formed[0], ResumeGeneration)
    plan = plan_in(formed)
    assert (plan.generation, plan.committed, plan.restores, plan.store) == (1, BEGIN, (), "tray-2:1")
    assert ranks(plan) == {0: "tray-2/0", 1: "tray-2/1", 2: "tray-10/0"}
    assert [(start.rank, start.spare, start.restarts) for start in every(StartWorker, formed)] == [
        (0, False, 0),
        (1, False, 0),
        (2, False, 0),
    ]


def test_with_enough_trays_the_last_call_is_waited_for() -> None:
    harness = CoreHarness(config(trays_min=1, trays_max=3, last_call_ms=500))
    called = [timer for timer in every(SetTimer, harness.join("a")) if str(timer.timer).startswith("last-call")]
    assert [timer.at_ms for timer in called] == [500]
    assert plan_in(harness.tell(TimerFired(timer=called[0].timer))).world_size == 4


def test_missing_trays_end_the_job_with_their_number() -> None:
    harness = CoreHarness(config(trays_min=3, trays_max=3, join_timeout_ms=1000))
    assert only(SetTimer, harness.core.begin(0)).at_ms == 1000
    harness.join("a")
    stop = stop_in(harness.tell(TimerFired(timer=timer_named("join"))))
    assert (stop.exit_code, stop.because) == (3, "2 of 3 trays missing after 1000 ms (1 joined: a)")


def test_while_trays_are_missing_no_other_timer_ends_the_job_and_the_last_one_not_once_they_are_there() -> None:
    harness = CoreHarness(config(trays_min=2, trays_max=3, join_timeout_ms=1000, last_call_ms=500))
    harness.join("a")
    for name in ("last-call", "fit", "breaker"):
        assert not every(StopJob, harness.tell(TimerFired(timer=timer_named(name))))
    harness.join("b")
    assert not harness.tell(TimerFired(timer=timer_named("join"))), "the last call is under way"
    assert plan_in(harness.tell(TimerFired(timer=timer_named("last-call")))).world_size == 8


def test_a_tray_lost_before_the_world_forms_is_not_counted() -> None:
    harness = CoreHarness(config(trays_min=2, trays_max=2))
    harness.join("a")
    harness.tray_lost("a")
    assert not every(StartWorker, harness.join("b"))


def test_more_spares_than_slots_are_a_mistake_of_the_user() -> None:
    stop = stop_in(CoreHarness(config(spares=4)).join("a", 4))
    assert (stop.exit_code, stop.because) == (2, "4 spares, but only 4 slots on 1 trays: nobody would train")


# -- setup -------------------------------------------------------------------------------------------------------------
def test_spares_start_once_everybody_is_ready(rack: CoreHarness) -> None:
    answers = [command for slot in rack.members for command in rack.ready(slot)]
    assert [(start.slot, start.rank, start.spare) for start in every(StartWorker, answers)] == [
        ("a/2", 0, True),
        ("b/2", 2, True),
    ]
    assert rack.view.phase == "training"


def test_a_resume_before_ready_is_tolerated(rack: CoreHarness) -> None:
    assert not rack.resumes("a/0")


def test_a_member_lost_before_the_first_step_restarts_the_world(rack: CoreHarness) -> None:
    rack.ready("a/0")
    lost = rack.exits("a/1", code=1)
    assert [fence.slot for fence in every(FenceWorker, lost)] == ["a/0", "b/0", "b/1"]
    rack.exits("a/0")
    rack.exits("b/0")
    again = rack.exits("b/1")
    assert plan_in(again).generation == 2
    assert [(start.slot, start.restarts) for start in every(StartWorker, again)] == [
        ("a/0", 1),
        ("a/1", 1),
        ("b/0", 1),
        ("b/1", 1),
    ]
    assert again[0].because == "rank 1 lost (exit code 1) before the first step; restart 1 of 3"  # type: ignore[union-attr]


# -- plain scripts -----------------------------------------------------------------------------------------------------
def test_a_plain_job_ends_when_all_ranks_have_exited_well(rack: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/0"):
        assert not rack.exits(slot, code=0)
    assert stop_in(rack.exits("b/1", code=0)).exit_code == 0


def test_a_lost_tray_of_a_plain_job_is_replaced_from_the_spare_slots(rack: CoreHarness) -> None:
    rack.tray_lost("b")
    rack.exits("a/0")
    stop = stop_in(rack.exits("a/1"))
    assert stop.because == "ranks 2, 3 lost (b lost: lease lapsed); 4 ranks need a slot, 3 are left on 1 trays"


def test_a_lost_tray_whose_agent_is_started_again_is_waited_for() -> None:
    harness = CoreHarness(config())
    harness.join("a", 2)
    assert "Waiting for a (its agent is started again)" in str(harness.tray_lost("a", returns=True))
    assert ranks(plan_in(harness.join("a", 2))) == {0: "a/0", 1: "a/1"}


@pytest.mark.parametrize("comes", ["nothing", "smaller", "dies again"])
def test_a_tray_that_should_come_back_is_not_waited_for_in_vain(comes: str) -> None:
    harness = CoreHarness(config())
    harness.join("a", 2)
    harness.tray_lost("a", returns=True)
    ways = {
        "nothing": lambda: harness.timer("exits"),
        "smaller": lambda: harness.join("a", 1),
        "dies again": lambda: harness.tray_lost("a"),
    }
    stop = stop_in(ways[comes]())
    left = 1 if comes == "smaller" else 0
    assert (
        stop.because == f"ranks 0, 1 lost (a lost: lease lapsed); 2 ranks need a slot, {left} are left on {left} trays"
    )


def test_no_rank_begins_again_on_a_gpu_that_may_not_be_used_and_it_is_waited_for() -> None:
    harness = CoreHarness(config(trays_min=2, trays_max=2, spares=1))
    for tray in ("a", "b"):
        harness.join(tray, 2)
    harness.checks("b/1", "its driver does not answer")
    harness.checks("a/0", "its memory is bad")
    harness.exits("a/0")
    harness.exits("b/0")
    assert not every(StartWorker, harness.exits("a/1")), "two slots are fit, and three ranks"
    assert {start.slot for start in every(StartWorker, harness.checks("b/1"))} == {"a/1", "b/0", "b/1"}


def test_ranks_keep_their_slots_over_a_restart_where_these_live() -> None:
    harness = CoreHarness(config(trays_min=3, trays_max=3, spares=2))
    for tray in ("a", "b", "c"):
        harness.join(tray, 2)
    harness.tray_lost("b")
    harness.exits("a/0")
    again = harness.exits("a/1")
    assert ranks(plan_in(again)) == {0: "a/0", 1: "a/1", 2: "c/0", 3: "c/1"}


@pytest.mark.parametrize(("how", "code"), [({"code": 1, "bug": "train.py:7"}, 1), ({"code": 4}, 1), ({"signal": 9}, 3)])
def test_too_many_restarts_end_the_job_and_say_whose_failure_it_was(how: dict[str, Any], code: int) -> None:
    harness = CoreHarness(config(max_restarts=1))
    harness.join("a", 2)
    harness.exits("a/1", **how)
    harness.exits("a/0")
    stop = stop_in(harness.exits("a/1", **how))
    assert (stop.exit_code, stop.rank, stop.failure is not None) == (code, 1, "bug" in how)
    assert stop.because.endswith("restarted 1 of 1 times already")


def test_a_job_that_cannot_be_restored_however_often_says_why_and_what_to_do() -> None:
    harness = CoreHarness(config(max_restarts=0))
    harness.join("a", 2)
    error = ScriptFailure(
        type="rackrun.errors.StateLost",
        message="no checkpoint can be read. Remedy: mend it.",
        traceback="",
        where="x:1",
    )
    stop = stop_in(harness.exits("a/1", failure=error))
    assert stop.exit_code == 3
    assert "no checkpoint can be read" in stop.because
    assert stop.remedy == "mend it."


def test_a_newcomer_without_memory_costs_its_slot_and_a_second_one_ends_the_job_with_what_to_do(
    training: CoreHarness,
) -> None:
    """Another process may hold one GPU's memory; that it holds two is less likely than that a rank does not fit."""
    full = ScriptFailure(
        type="torch.OutOfMemoryError", message="CUDA out of memory.", traceback="", where="state.py:80"
    )
    training.exits("b/1", signal=9)
    newcomer = plan_in(training.park_all()).members[3].slot
    again = training.exits(newcomer, failure=full, step=4)
    assert only(BreakGeneration, again).because == "rank 3 lost (torch.OutOfMemoryError at state.py:80)"
    other = plan_in(training.park_all()).members[3].slot
    assert other != newcomer
    stop = stop_in(training.exits(other, failure=full, step=4))
    assert (stop.exit_code, stop.rank) == (1, 3)
    assert "torch.OutOfMemoryError at state.py:80 on rank 3 at step 4, as on rank 3 before" in stop.because
    assert "needs as much memory as that rank had: see what else is on its GPU (nvidia-smi)" in stop.remedy


def test_what_is_killed_and_does_not_exit_ends_the_job(rack: CoreHarness) -> None:
    rack.exits("a/0")
    stop = stop_in(rack.timer("exits"))
    assert "a/1, b/0, b/1 did not exit within 600000 ms" in stop.because


# -- the end -----------------------------------------------------------------------------------------------------------
def test_when_all_have_finished_all_are_released_and_the_job_is_done(training: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/0"):
        assert not training.finishes(slot)
    released = only(ReleaseWorkers, training.finishes("b/1"))
    assert [worker.slot for worker in released.workers] == ["a/0", "a/1", "b/0", "b/1", "a/2", "b/2"]
    for slot in ("a/2", "a/0", "a/1", "b/0"):
        assert not training.exits(slot, code=0)
    assert stop_in(training.exits("b/1", code=0)).exit_code == 0


def test_a_member_lost_before_the_release_is_swapped_and_the_others_say_again_that_they_have_finished(
    training: CoreHarness,
) -> None:
    """Some may have to do more for who takes over, and be lost over that."""
    for slot in ("a/0", "a/1", "b/0"):
        training.finishes(slot)
    training.exits("b/1")
    training.park_all()
    training.resume_all()
    for slot in ("a/0", "a/1", "b/0"):
        assert not every(ReleaseWorkers, training.finishes(slot))
    only(ReleaseWorkers, training.finishes("b/2"))


@pytest.mark.parametrize(("resumed", "is_a_source"), [(2, True), (1, False)])
def test_who_has_its_state_is_a_source_though_nobody_heard_that_it_resumed(
    training: CoreHarness, resumed: int, is_a_source: bool
) -> None:
    """Those that gave it may be gone before its word arrives."""
    training.exits("b/1")
    training.park_all()
    for slot in ("a/0", "a/1", "b/0"):
        training.exits(slot)
    training.timer("gather")
    begins_again = every(FenceWorker, training.parks("b/2", resumed=resumed))
    assert bool(begins_again) is not is_a_source


def test_a_bad_exit_after_the_release_is_the_scripts(training: CoreHarness) -> None:
    for slot in training.members:
        training.finishes(slot)
    stop = stop_in(training.exits("a/1", code=1, bug="train.py:99"))
    assert (stop.exit_code, stop.rank) == (1, 1)


def test_a_requested_stop_drains_first_and_ends_with_its_own_code(training: CoreHarness) -> None:
    drained = training.tell(stop_request(143))
    assert [worker.slot for worker in only(DrainWorkers, drained).workers] == training.members
    for slot in training.members:
        training.finishes(slot)
    stops = [stop for slot in training.members for stop in every(StopJob, training.exits(slot, code=0))]
    assert [(stop.exit_code, stop.because) for stop in stops] == [(143, "Ctrl-C")]


def test_a_second_request_does_not_wait(training: CoreHarness) -> None:
    training.tell(stop_request())
    assert stop_in(training.tell(stop_request())).exit_code == 130


def test_a_request_before_training_does_not_wait(rack: CoreHarness) -> None:
    assert stop_in(rack.tell(stop_request())).exit_code == 130


def test_a_drain_that_takes_too_long_ends_the_job(training: CoreHarness) -> None:
    training.tell(stop_request())
    assert (
        stop_in(training.tell(TimerFired(timer=timer_named("drain")))).because == "Ctrl-C; not drained within 60000 ms"
    )


def test_a_request_during_a_recovery_drains_after_it(training: CoreHarness) -> None:
    training.exits("a/1")
    assert not every(DrainWorkers, training.tell(stop_request()))
    training.park_all()
    only(DrainWorkers, training.resume_all())


def test_a_journal_that_cannot_be_written_ends_the_job(training: CoreHarness) -> None:
    stop = stop_in(training.tell(JournalFailed(because="no space left on device")))
    assert (stop.exit_code, "disk space" in stop.remedy) == (3, True)


def test_after_the_end_everything_is_ignored(training: CoreHarness) -> None:
    training.tell(JournalFailed(because="no space left on device"))
    assert not training.exits("a/0")
    assert not training.join("c")
    assert not training.tell(stop_request())
    assert training.view.phase == "stopped"


def test_a_tray_that_comes_back_unannounced_is_lost_first(training: CoreHarness) -> None:
    assert only(BreakGeneration, training.join("b", 3)).because == "ranks 2, 3 lost (b came back empty)"
