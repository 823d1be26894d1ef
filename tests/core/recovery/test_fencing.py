"""Break before fence: on GPUs a living culprit is killed only when the others have left the generation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.recovery.fencing import FENCE_WAIT_MS
from rackrun.protocol.commands import BreakGeneration, Command, CondemnWorker, FenceWorker, ResumeGeneration, SetTimer
from rackrun.protocol.events import JournalFailed, ReplicasDiffer, StopRequested, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation, Position, Rank
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import FenceOver, timer_named
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in


def gpus(ranks: int = 4, spares: int = 2, *, clique: str = "x") -> CoreHarness:
    """Trays of two GPUs, each rank a replica of every other; the last trays hold the spares."""
    trays = "abcdef"[: (ranks + spares) // 2]
    harness = CoreHarness(JobConfig(trays_min=len(trays), trays_max=len(trays), spares=spares))
    for tray in trays:
        harness.join(tray, 2, clique=clique)
    harness.train()
    return harness


@pytest.fixture
def four() -> CoreHarness:
    """Ranks 0 to 3 on a/0, a/1, b/0, b/1; c/0 and c/1 wait."""
    return gpus()


def kinds(commands: Sequence[Command]) -> list[str]:
    wanted = CondemnWorker | FenceWorker | BreakGeneration | ResumeGeneration
    return [type(command).__name__ for command in commands if isinstance(command, wanted)]


def overdue(harness: CoreHarness, slot: str) -> Sequence[Command]:
    return harness.tell(TimerFired(timer=timer_named(f"fence:{slot}:{harness.incarnation[slot]}")))


# -- the order -------------------------------------------------------------------------------------------------------
def test_a_stopped_rank_counts_as_lost_at_once_and_is_killed_when_all_others_have_parked(four: CoreHarness) -> None:
    silent = four.stalls("b/1", silent=True)
    assert kinds(silent) == ["CondemnWorker", "BreakGeneration"]
    assert [worker.slot for worker in only(BreakGeneration, silent).workers] == ["a/0", "a/1", "b/0"]
    assert four.view.ranks[3].state == "lost"
    assert kinds(four.parks("a/0", 4)) == kinds(four.parks("a/1", 4)) == []
    killed = only(FenceWorker, four.parks("b/0", 4))
    condemned = only(CondemnWorker, silent)
    assert (killed.slot, killed.because, killed.fault) == (condemned.slot, condemned.because, condemned.fault)
    assert killed.slot == "b/1"


def test_the_window_that_gathers_faults_does_not_hold_the_kill_up(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    for slot in ("a/0", "a/1"):
        four.parks(slot, 4)
    assert kinds(four.parks("b/0", 4)) == ["FenceWorker"]
    assert kinds(four.timer("gather")) == ["ResumeGeneration"]


@pytest.mark.parametrize("how", ["judged", "stalled", "late to resume"])
def test_whatever_a_living_rank_is_condemned_for_the_others_are_broken_first(four: CoreHarness, how: str) -> None:
    if how == "judged":
        answers = four.judges("b/1", Health.LOST)
    elif how == "stalled":
        for slot in ("a/0", "a/1", "b/0"):
            four.stalls(slot, 11, waiting=True)
        four.stalls("b/1", 10, waiting=True)
        answers = four.timer("stalled")
    else:
        four.exits("b/1", signal=9)
        four.park_all()
        for slot in ("a/0", "a/1", "b/0"):
            four.resumes(slot)
        answers = four.timer("resume")
    assert kinds(answers) == ["CondemnWorker", "BreakGeneration"]
    assert kinds(four.park_all())[0] == "FenceWorker"


def test_a_planned_swap_breaks_first_too_because_kernels_of_the_last_step_may_still_run(four: CoreHarness) -> None:
    four.judges("b/1", Health.DEGRADED)
    assert kinds(four.pause_all()) == ["CondemnWorker", "BreakGeneration"]
    assert kinds(four.park_all()) == ["FenceWorker", "ResumeGeneration"]


def test_a_rank_whose_state_is_not_that_of_its_replicas_is_no_exception(four: CoreHarness) -> None:
    differs = ReplicasDiffer(
        **four._who("a/0"),
        generation=Generation(four.view.generation),
        at=Position(4),
        culprits=(Rank(3),),
        good=Position(3),
        again=False,
        differing=(),
    )
    answers = four.tell(differs)
    assert kinds(answers) == ["CondemnWorker", "BreakGeneration"]
    assert only(CondemnWorker, answers).fault
    assert kinds(four.park_all())[0] == "FenceWorker"


def test_without_gpus_the_fence_goes_first_as_there_is_nothing_to_wait_for() -> None:
    harness = gpus(clique="")
    assert kinds(harness.stalls("b/1", silent=True)) == ["FenceWorker", "BreakGeneration"]
    assert not [t for t in every(SetTimer, harness.answers) if isinstance(t.timer, FenceOver)]


def test_a_spare_shares_no_memory_and_goes_at_once(four: CoreHarness) -> None:
    assert kinds(four.stalls("c/0", silent=True)) == ["FenceWorker"]


# -- how long --------------------------------------------------------------------------------------------------------
def test_who_does_not_park_holds_the_kill_up_for_half_a_second_at_the_most(four: CoreHarness) -> None:
    (timer,) = [t for t in every(SetTimer, four.stalls("b/1", silent=True)) if isinstance(t.timer, FenceOver)]
    assert timer.at_ms == four.now + FENCE_WAIT_MS == four.now + 500
    four.parks("a/0", 4)
    assert only(FenceWorker, four.tell(TimerFired(timer=timer.timer))).slot == "b/1"
    assert not every(FenceWorker, four.park_all()), "once"


def test_its_timer_says_nothing_once_it_is_killed(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.park_all()
    assert kinds(overdue(four, "b/1")) == []


def test_the_timer_of_one_culprit_leaves_another_alone(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.now += 100
    second = four.stalls("b/0", silent=True)
    assert kinds(second) == ["CondemnWorker"]
    assert [t.at_ms for t in every(SetTimer, second) if isinstance(t.timer, FenceOver)] == [four.now + FENCE_WAIT_MS]
    assert [one.slot for one in every(FenceWorker, overdue(four, "b/1"))] == ["b/1"]
    assert [one.slot for one in every(FenceWorker, four.park_all())] == ["b/0"]


# -- something else happens in the middle ------------------------------------------------------------------------------
def test_a_culprit_that_dies_by_itself_meanwhile_is_not_killed_again(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    assert kinds(four.exits("b/1", signal=9)) == []
    parked = four.park_all()
    assert kinds(parked) == ["ResumeGeneration"]
    assert plan_in(parked).members[3].slot in ("c/0", "c/1")
    assert kinds(overdue(four, "b/1")) == []


def test_its_tray_may_be_lost_meanwhile(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.tray_lost("b")
    assert kinds(four.park_all()) == ["ResumeGeneration"]


def test_a_survivor_that_is_lost_meanwhile_is_waited_for_no_longer(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.parks("a/0", 4)
    four.parks("a/1", 4)
    assert kinds(four.exits("b/0", signal=9)) == ["FenceWorker"]


def test_the_others_all_gone_nobody_is_waited_for() -> None:
    two = gpus(ranks=2)
    assert two.members == ["a/0", "b/0"]
    two.stalls("b/0", silent=True)
    assert kinds(two.exits("a/0", signal=9)) == ["FenceWorker"]


def test_of_two_culprits_both_are_killed_when_the_rest_has_parked(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.stalls("b/0", silent=True)
    parked = four.park_all()
    assert [one.slot for one in every(FenceWorker, parked)] == ["b/1", "b/0"]
    assert {member.slot for member in plan_in(parked).members} == {"a/0", "a/1", "c/0", "c/1"}


def test_all_being_condemned_at_once_nobody_is_left_to_be_hurt() -> None:
    two = gpus(ranks=2)
    two.stalls("b/0", silent=True)
    assert kinds(two.stalls("a/0", silent=True)) == ["CondemnWorker", "FenceWorker", "FenceWorker"]


def test_a_new_start_of_all_comes_after_the_kill() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, start_over=True))
    for tray in "ab":
        harness.join(tray, 2, clique="x")
    harness.train("unique")
    harness.stalls("b/1", silent=True)
    harness.timer("gather")
    harness.timer("owed")
    fenced = [one.slot for one in every(FenceWorker, harness.park_all())]
    assert harness.view.phase == "restarting"
    assert fenced == ["b/1", "a/0", "a/1", "b/0"], "each once"


def test_a_stop_that_waits_for_a_step_does_not_change_it(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    assert not every(FenceWorker, four.tell(StopRequested(because="SIGINT", exit_code=130)))
    assert kinds(four.park_all()) == ["FenceWorker", "ResumeGeneration"]


def test_the_end_of_the_job_ends_the_condemned_with_all_others(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    ends = four.tell(JournalFailed(because="no space"))
    assert stop_in(ends).exit_code == 3
    assert not every(FenceWorker, ends)
    assert not overdue(four, "b/1")


def test_nothing_is_decided_before_it_is_killed(four: CoreHarness) -> None:
    """A plan after the kill: whoever takes the rank over may take its slot's place, and its GPU's memory."""
    four.stalls("b/1", silent=True)
    four.timer("gather")
    out = [*four.parks("a/0", 4), *four.parks("a/1", 4), *four.parks("b/0", 4)]
    assert kinds(out) == ["FenceWorker", "ResumeGeneration"]


def test_a_loss_in_the_generation_after_it_is_its_own_story(four: CoreHarness) -> None:
    four.stalls("b/1", silent=True)
    four.park_all()
    four.exits("b/1", signal=9)
    four.resume_all()
    again = four.stalls("a/0", silent=True)
    assert kinds(again) == ["CondemnWorker", "BreakGeneration"]
    assert [one.slot for one in every(FenceWorker, four.park_all())] == ["a/0"]
