"""Who is to blame when nobody moves, and who is not: whoever works is waited for, and what hangs twice in one place is the script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rackrun.core.faults.stalls import BUSY_HOLDS_MS
from rackrun.protocol.commands import BreakGeneration, Command, FenceWorker, Notice, ReleaseWorkers, SetTimer, StopJob
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in

PHASE = "phase evaluate (run.every(4, ...)) after step 8"


def judged(harness: CoreHarness) -> list[Command]:
    return [*harness.timer("stalled"), *harness.timer("judge")]


def swapped(harness: CoreHarness, slot: str) -> None:
    """Whoever was condemned in ``slot`` has gone, and all train again."""
    harness.exits(slot, signal=9)
    harness.park_all(passed=4)
    harness.resume_all()
    assert harness.view.phase == "training"


# -- those that wait, wait rightly ------------------------------------------------------------------------------------
def test_who_waits_for_a_rank_that_works_is_not_stalled_and_its_unit_is_not_done_twice(training: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/1"):
        training.stalls(slot, 11, waiting=True)
    assert not every(FenceWorker, judged(training))
    assert training.view.phase == "training"


def test_who_goes_on_after_all_is_not_blamed_later(training: CoreHarness) -> None:
    training.stalls("b/0", 10)
    training.stalls("b/0", 10, over=True)
    for slot in ("a/0", "a/1"):
        training.stalls(slot, 11, waiting=True)
    assert not every(FenceWorker, judged(training))


def test_who_stands_in_its_own_code_is_to_blame_though_others_have_longer_deadlines(training: CoreHarness) -> None:
    training.stalls("b/0", 10, unit=PHASE, where="train.py:31 in evaluate", allowed_ms=6000)
    training.stalls("a/0", 11, waiting=True, unit=PHASE, where="train.py:44 in main")
    fenced = only(FenceWorker, judged(training))
    assert fenced.slot == "b/0"
    assert fenced.because == (
        "stalled at collective 10, others wait at 11 (2 of 4 ranks report): "
        f"rank 2 stands in {PHASE} at train.py:31 in evaluate; rank 0 waits in {PHASE} at train.py:44 in main; "
        "run.expect(seconds) allows more than 6 s"
    )


def test_when_most_stand_in_their_own_code_and_one_works_nobody_is_taken_out(training: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/1"):
        training.stalls(slot, 10)
    assert not judged(training)[1:]
    assert training.view.phase == "training"


# -- the same again ---------------------------------------------------------------------------------------------------
def test_the_same_stall_twice_ends_the_job_with_the_line(training: CoreHarness) -> None:
    where: dict[str, Any] = {"unit": PHASE, "where": "train.py:31 in evaluate"}
    training.stalls("b/0", 10, **where)
    assert only(FenceWorker, judged(training)).slot == "b/0"
    swapped(training, "b/0")
    training.stalls("b/2", 10, **where)
    stop = stop_in(judged(training))
    assert stop.exit_code == 1
    assert "came twice" in stop.because
    assert "train.py:31 in evaluate" in stop.because


@pytest.mark.parametrize("other", [{"where": "train.py:32 in evaluate"}, {"step": 6}, {"phase": 1}])
def test_a_stall_elsewhere_is_another_one(training: CoreHarness, other: dict[str, Any]) -> None:
    where: dict[str, Any] = {"unit": PHASE, "where": "train.py:31 in evaluate"}
    training.stalls("b/0", 10, **where)
    judged(training)
    swapped(training, "b/0")
    training.stalls("b/2", 10, **{**where, **other})
    assert only(FenceWorker, judged(training)).slot == "b/2"


def test_what_nobody_knows_the_place_of_is_not_the_scripts(training: CoreHarness) -> None:
    training.stalls("b/0", 10)
    judged(training)
    swapped(training, "b/0")
    training.stalls("b/2", 10)
    assert not every(StopJob, judged(training))


def test_a_collective_that_only_some_have_entered_names_each_place_and_is_done_again_once(
    training: CoreHarness,
) -> None:
    def stall() -> list[Command]:
        for slot in training.members:
            line = 9 if slot == "a/0" else 12
            training.stalls(slot, 11, waiting=True, unit=PHASE, where=f"train.py:{line} in evaluate")
        return judged(training)

    announced = only(BreakGeneration, stall())
    assert f"rank 0 waits in {PHASE} at train.py:9 in evaluate" in announced.because
    assert f"ranks 1, 2, 3 wait in {PHASE} at train.py:12 in evaluate" in announced.because
    training.park_all(passed=4)
    training.resume_all()
    stop = stop_in(stall())
    assert (stop.exit_code, "train.py:9" in stop.because, "train.py:12" in stop.because) == (1, True, True)


# -- people are told ---------------------------------------------------------------------------------------------------
def test_people_are_told_once_of_who_works_for_long(training: CoreHarness) -> None:
    notice = only(Notice, training.works("b/0"))
    assert "rank 2 works in phase save, at train.py:7 in save, for 4 s" in notice.text
    assert "run.expect" in notice.text
    assert not training.works("b/0")


# -- a recovery that somebody does not come to -----------------------------------------------------------------------------
def test_who_works_is_waited_for_and_the_successor_of_the_lost_rank_stays(training: CoreHarness) -> None:
    training.exits("b/0", signal=9)
    training.park_all(passed=4)
    assert "all wait for rank 1" in only(Notice, training.works("a/1", awaited=True)).text
    answers = training.timer("resume")
    assert not every(FenceWorker, answers)
    assert [str(timer.timer) for timer in every(SetTimer, answers)] == ["resume:2"]
    training.now += BUSY_HOLDS_MS + 1
    assert [fenced.slot for fenced in every(FenceWorker, training.timer("resume"))] == ["b/2"], "nothing is heard of it"


def test_who_hangs_while_all_are_called_is_replaced_and_not_the_successor(training: CoreHarness) -> None:
    training.exits("b/0", signal=9)
    training.park_all(passed=4)
    training.stalls("a/1", 10, unit="the script's code between two units, after step 4", where="train.py:50 in main")
    fenced = only(FenceWorker, judged(training))
    assert (fenced.slot, fenced.fault) == ("a/1", True)
    assert "train.py:50 in main" in fenced.because
    assert "did not come to the recovery" in fenced.because


def test_most_that_idle_while_all_are_called_have_until_the_resume_timeout_and_no_longer(training: CoreHarness) -> None:
    for slot in ("a/1", "b/0", "b/1"):
        training.stalls(slot, 10, unit="step 4", where="train.py:20 in step")
    training.stalls("a/0", 11, waiting=True, unit="step 4")
    judged(training)
    assert training.view.phase == "parking", "most are to blame, so none is: the step is done again in place"
    training.park_all(passed=4)
    for slot in ("a/1", "b/0", "b/1"):
        training.works(slot, awaited=True)
        assert not every(FenceWorker, training.stalls(slot, 10, unit="step 4", where="train.py:20 in step"))
    assert not every(FenceWorker, judged(training)), "the machine may be slow"
    fenced = every(FenceWorker, training.timer("resume"))
    assert sorted(one.slot for one in fenced) == ["a/1", "b/0", "b/1"], "the one that waits for them is not late"


def test_who_holds_the_interpreters_lock_and_works_is_waited_for_until_it_parks(training: CoreHarness) -> None:
    training.exits("b/0", signal=9)
    training.timer("gather")
    for slot in ("a/0", "b/1"):
        training.parks(slot)
    training.works("a/1", awaited=True)
    assert not every(FenceWorker, training.timer("park"))
    assert plan_in(training.parks("a/1")).generation == 2


def test_who_works_for_longer_than_hardware_may_take_to_come_ends_nothing(training: CoreHarness) -> None:
    training.exits("b/0", signal=9)
    training.timer("gather")
    for slot in ("a/0", "b/1"):
        training.parks(slot)
    training.works("a/1", awaited=True)
    assert not every(StopJob, training.timer("recover"))
    answers = training.parks("a/1")
    assert "recover:2" in [str(timer.timer) for timer in every(SetTimer, answers)], "spares would have the whole time"
    assert plan_in(answers).generation == 2


def test_while_one_rank_works_nobody_is_said_to_wait_for_those_that_have_returned(training: CoreHarness) -> None:
    training.finishes("a/0")
    for slot in ("a/1", "b/0"):
        training.stalls(slot, 11, waiting=True, unit="the script's code between two units, after step 8")
    assert not every(StopJob, judged(training))
    answers = training.stalls("b/1", 11, waiting=True, unit="the script's code between two units, after step 8")
    assert "rank 0 returned from main" in stop_in(answers).because


# -- nothing was observed there, but on the others ---------------------------------------------------------------------
BETWEEN: dict[str, Any] = {"unit": "the script's code between two units, after step 0", "where": "train.py:50 in main"}


def idle(harness: CoreHarness, slot: str, for_ms: int, collective: int = 10, **further: Any) -> Sequence[Command]:
    """It has been idle for so long in its own code, where it has no history."""
    return harness.stalls(slot, collective, early=True, for_ms=for_ms, **{**BETWEEN, **further})


def wait(
    harness: CoreHarness, slots: Sequence[str], *, took_ms: int = 20, collective: int = 11, early: bool = True
) -> list[Command]:
    """They wait in a collective, and came to it within ``took_ms``."""
    further: dict[str, Any] = {"early": early, "waiting": True, "took_ms": took_ms, "for_ms": 10_000}
    return [command for slot in slots for command in harness.stalls(slot, collective, **further)]


@pytest.mark.parametrize("early", [True, False], ids=["limits of minutes", "limits that are over"])
def test_who_is_idle_where_all_others_have_passed_is_to_blame(early: bool, training: CoreHarness) -> None:
    wait(training, ("a/0", "a/1", "b/1"), early=early)
    answers = idle(training, "b/0", 30_000)
    assert only(FenceWorker, answers).slot == "b/0"
    assert "train.py:50 in main" in only(FenceWorker, answers).because


def test_the_idle_one_is_found_whoever_is_heard_last(training: CoreHarness) -> None:
    assert not every(FenceWorker, idle(training, "b/0", 30_000))
    assert only(FenceWorker, wait(training, ("a/0", "a/1", "b/1"))).slot == "b/0"


def test_three_times_what_the_others_took_is_not_over_yet(training: CoreHarness) -> None:
    wait(training, ("a/0", "a/1", "b/1"), took_ms=12_000)
    assert not every(FenceWorker, idle(training, "b/0", 35_000))
    assert only(FenceWorker, idle(training, "b/0", 37_000)).slot == "b/0"


def test_while_one_rank_works_nobody_is_compared(training: CoreHarness) -> None:
    wait(training, ("a/0", "a/1"))
    assert not every(FenceWorker, idle(training, "b/0", 300_000))


def test_who_goes_on_after_it_waited_has_not_passed(training: CoreHarness) -> None:
    wait(training, ("a/0", "a/1", "b/1"))
    training.stalls("a/1", 11, over=True)
    assert not every(FenceWorker, idle(training, "b/0", 30_000))


def test_who_waits_before_that_place_has_not_passed(training: CoreHarness) -> None:
    wait(training, ("a/0", "a/1"))
    wait(training, ("b/1",), collective=10)
    assert not every(FenceWorker, idle(training, "b/0", 30_000))


def test_when_most_are_idle_nobody_is_to_blame(training: CoreHarness) -> None:
    wait(training, ("a/0",))
    for slot in ("a/1", "b/0", "b/1"):
        assert not every(FenceWorker, idle(training, slot, 60_000))


def test_two_idle_ranks_of_four_are_found_one_after_the_other_heard(training: CoreHarness) -> None:
    wait(training, ("a/0", "b/1"))
    assert not every(FenceWorker, idle(training, "a/1", 30_000))
    assert {one.slot for one in every(FenceWorker, idle(training, "b/0", 30_000))} == {"a/1", "b/0"}


def test_what_was_said_long_ago_may_be_over(training: CoreHarness) -> None:
    wait(training, ("a/0", "b/1"))
    idle(training, "a/1", 30_000)
    training.now += 20_000
    assert not every(FenceWorker, idle(training, "b/0", 30_000)), "a/1 works again, or it would have said so"


def test_who_is_idle_after_the_loop_while_all_others_have_returned_is_replaced(training: CoreHarness) -> None:
    for slot in ("a/0", "a/1", "b/1"):
        training.finishes(slot, took_ms=40)
    assert only(FenceWorker, idle(training, "b/0", 30_000)).slot == "b/0"


def test_who_is_idle_in_its_setup_while_all_others_wait_for_it_makes_the_world_begin_again() -> None:
    harness = starting()
    harness.elastic("a/0")
    harness.ready("a/0")
    wait(harness, ("a/0", "a/1", "b/0"), took_ms=4_000, collective=1)
    answers = idle(harness, "b/1", 30_000, 0, unit="setup")
    assert "b/1" in [one.slot for one in every(FenceWorker, answers)]


def test_a_spare_is_idle_in_its_setup_for_three_times_as_long_as_any_rank_took() -> None:
    harness = starting()
    for slot in harness.members:
        harness.ready(slot, setup_ms=15_000)
    setup = {"unit": "setup", "where": "train.py:3 in main"}
    assert not every(FenceWorker, idle(harness, "b/2", 40_000, 0, **setup))
    assert only(FenceWorker, idle(harness, "b/2", 46_000, 0, **setup)).slot == "b/2"
    harness.ready("a/2")
    assert not every(FenceWorker, idle(harness, "a/2", 90_000, 0, **setup)), "it has come to run.steps()"


def test_who_is_idle_while_all_are_called_elsewhere_is_late_though_nothing_was_observed(training: CoreHarness) -> None:
    training.exits("b/0", signal=9)
    training.park_all(passed=4)
    idle(training, "a/1", 30_000)
    assert only(FenceWorker, judged(training)).slot == "a/1"


# -- everything is done, and one does not end -------------------------------------------------------------------------
AFTER: dict[str, Any] = {"unit": "the script's code after main", "where": "train.py:70 in upload"}


def test_who_is_idle_after_main_while_the_others_have_ended_holds_nobody(training: CoreHarness) -> None:
    finished(training)
    training.now += 2_000
    for slot in ("a/0", "a/1", "b/0"):
        training.exits(slot, code=0)
    training.now += 3_000
    assert not every(FenceWorker, idle(training, "b/1", 5_000, **AFTER)), "they took 2 s"
    training.now += 1_500
    answers = idle(training, "b/1", 6_500, **AFTER)
    assert only(FenceWorker, answers).slot == "b/1"
    assert "train.py:70 in upload" in only(Notice, answers).text
    assert stop_in(answers).exit_code == 0


def test_who_is_idle_after_main_as_most_are_has_its_own_limit(training: CoreHarness) -> None:
    finished(training)
    training.exits("a/0", code=0)
    for slot in ("a/1", "b/0", "b/1"):
        assert not every(FenceWorker, idle(training, slot, 60_000, **AFTER))


def test_while_another_works_after_main_nobody_is_compared(training: CoreHarness) -> None:
    finished(training)
    for slot in ("a/0", "a/1"):
        training.exits(slot, code=0)
    assert not every(FenceWorker, idle(training, "b/1", 60_000, **AFTER))


# -- everything is done --------------------------------------------------------------------------------------------------
def finished(harness: CoreHarness) -> Sequence[Command]:
    return [command for slot in list(harness.members) for command in harness.finishes(slot)]


def test_a_rank_that_dies_after_it_has_finished_is_not_replaced(training: CoreHarness) -> None:
    training.finishes("a/1")
    answers = training.exits("a/1", signal=9)
    assert not every(BreakGeneration, answers)
    assert "rank 1 had finished training" in only(Notice, answers).text
    for slot in ("a/0", "b/0"):
        training.finishes(slot)
    released = only(ReleaseWorkers, training.finishes("b/1"))
    assert len(released.workers) == 3 + 2, "three ranks and two spares"
    for slot in ("a/0", "b/0"):
        assert not every(StopJob, training.exits(slot, code=0))
    assert stop_in(training.exits("b/1", code=0)).exit_code == 0


def test_when_the_last_that_had_not_finished_is_lost_who_had_is_missed_again(training: CoreHarness) -> None:
    training.finishes("a/1")
    training.exits("a/1", signal=9)
    assert every(BreakGeneration, training.exits("b/0", signal=9))
    assert min(plan_in(training.park_all(passed=4)).restores, key=lambda one: one.rank).rank == 1


@pytest.mark.parametrize("how", [{"signal": 9}, {"signal": 11}, {"signal": 6}])
def test_who_dies_when_all_is_done_does_not_change_the_exit_code(training: CoreHarness, how: dict[str, Any]) -> None:
    finished(training)
    for slot in ("a/0", "a/1", "b/0"):
        training.exits(slot, code=0)
    assert stop_in(training.exits("b/1", **how)).exit_code == 0


def test_what_the_script_itself_raises_after_main_still_does(training: CoreHarness) -> None:
    finished(training)
    assert stop_in(training.exits("b/1", code=4)).exit_code == 1


def test_who_is_stopped_when_all_is_done_holds_nobody(training: CoreHarness) -> None:
    finished(training)
    for slot in ("a/0", "a/1", "b/0"):
        training.exits(slot, code=0)
    answers = training.stalls("b/1", silent=True)
    assert only(FenceWorker, answers).slot == "b/1"
    assert stop_in(answers).exit_code == 0


def test_a_tray_that_is_lost_when_all_is_done_is_no_loss(training: CoreHarness) -> None:
    finished(training)
    training.exits("a/0", code=0)
    training.exits("a/1", code=0)
    assert stop_in(training.tray_lost("b")).exit_code == 0


# -- the script fails on all ranks alike, at its start --------------------------------------------------------------------
def starting() -> CoreHarness:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 3)
    harness.join("b", 3)
    return harness


@pytest.mark.parametrize(
    "how", [{"code": 2, "early": True}, {"code": 1, "bug": "train.py:1", "early": True}, {"code": 127}]
)
def test_what_all_ranks_fail_with_at_once_ends_the_job_at_once(how: dict[str, Any]) -> None:
    harness = starting()
    for slot in ("a/0", "a/1", "b/0"):
        assert not every(FenceWorker, harness.exits(slot, **how))
    stop = stop_in(harness.exits("b/1", **how))
    assert stop.exit_code == 1
    assert "all 4 ranks failed alike before the first step" in stop.because


def test_one_rank_that_fails_alone_starts_the_world_again_after_a_while() -> None:
    harness = starting()
    assert not every(FenceWorker, harness.exits("a/0", code=1, bug="train.py:1", early=True))
    assert len(every(FenceWorker, harness.timer("bugs"))) == 3


@pytest.mark.parametrize("then", [{"code": 1, "bug": "train.py:2", "early": True}, {"signal": 9}])
def test_ranks_that_end_differently_start_the_world_again_at_once(then: dict[str, Any]) -> None:
    harness = starting()
    harness.exits("a/0", code=1, bug="train.py:1", early=True)
    assert len(every(FenceWorker, harness.exits("a/1", **then))) == 2


def test_what_a_plain_script_fails_with_later_is_answered_as_torchrun_does() -> None:
    harness = starting()
    assert len(every(FenceWorker, harness.exits("a/0", code=1, bug="train.py:90"))) == 3


def test_a_stopped_rank_of_a_plain_script_is_lost() -> None:
    harness = starting()
    assert [one.slot for one in every(FenceWorker, harness.stalls("a/1", silent=True))] == ["a/1", "a/0", "b/0", "b/1"]
