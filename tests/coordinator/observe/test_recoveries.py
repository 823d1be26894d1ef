"""What the watch makes of the events and commands of a failure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackrun.coordinator.observe.recoveries import RecoveryRecord, RecoveryWatch
from rackrun.protocol.commands import (
    BreakGeneration,
    CondemnWorker,
    Decided,
    FenceWorker,
    ResumeGeneration,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import (
    ReplicasDiffer,
    TrayLost,
    WorkerElastic,
    WorkerExited,
    WorkerParked,
    WorkerPaused,
    WorkerResumed,
    WorkerStalled,
)
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.policy_types import Decision, Failure, Rung
from rackrun.protocol.wire import StateCopied
from tests.coordinator.fakes import member, plan, unit, worker

FIRST = plan(1, member(0, "tray-00/0", 1), member(1, "tray-00/1", 2), member(2, "tray-00/2", 3))


class Story(RecoveryWatch):
    """Time goes by 10 ms with each thing that happens."""

    def __init__(self) -> None:
        self.told_of: list[RecoveryRecord] = []
        self.now = 0.0
        super().__init__(self.told_of.append)

    def hears(self, event: object) -> None:
        self.now += 10
        self.on_event(event, self.now)  # type: ignore[arg-type]

    def does(self, command: object) -> None:
        cause = self.now
        self.now += 10
        self.on_command(command, cause, self.now)  # type: ignore[arg-type]

    def commits(self, *ranks: int, step: int, generation: int, attempt: int = 0, rescaled: int = 0) -> None:
        for rank in ranks:
            self.now += 10
            self.committed(unit(step, rank, generation=generation, attempt=attempt, rescaled=rescaled), self.now)


@pytest.fixture
def story() -> Story:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    story.hears(WorkerElastic(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)))
    return story


def exited(slot: str, incarnation: int) -> WorkerExited:
    return WorkerExited(slot=SlotId(slot), incarnation=Incarnation(incarnation), signal=9)


def parked(slot: str, incarnation: int, generation: int, begun: Position = BEGIN) -> WorkerParked:
    who = {"slot": SlotId(slot), "incarnation": Incarnation(incarnation)}
    return WorkerParked(**who, generation=Generation(generation), begun=begun)  # type: ignore[arg-type]


def resumed(slot: str, incarnation: int, generation: int) -> WorkerResumed:
    return WorkerResumed(slot=SlotId(slot), incarnation=Incarnation(incarnation), generation=Generation(generation))


def breaking(generation: int) -> BreakGeneration:
    return BreakGeneration(generation=Generation(generation), workers=(worker("tray-00/0", 1),), because="rank 2 lost")


def test_the_first_generation_is_no_recovery(story: Story) -> None:
    story.commits(0, 1, 2, step=0, generation=1)
    story.finish()
    assert story.told_of == []


def test_a_swap_is_timed_stage_by_stage(story: Story) -> None:
    swapped = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(40))
    story.hears(exited("tray-00/2", 3))
    began = story.now
    story.does(breaking(2))
    for rank in (0, 1):
        story.hears(parked(f"tray-00/{rank}", rank + 1, 2))
    story.does(ResumeGeneration(plan=swapped, because="swap"))
    for slot, incarnation in (("tray-00/0", 1), ("tray-00/1", 2), ("tray-00/4", 9)):
        story.hears(resumed(slot, incarnation, 2))
    story.commits(0, 1, step=40, generation=2)  # the unit that some had missed: not yet a new one
    story.commits(0, 1, 2, step=41, generation=2, attempt=1)
    (recovery,) = story.told_of
    assert recovery.kind == "swap"
    times = (recovery.break_ms, recovery.parked_ms, recovery.plan_ms, recovery.resumed_ms, recovery.committed_ms)
    assert recovery.fault_ms == began
    assert times == (began + 10, began + 30, began + 40, began + 70, began + 120)
    assert recovery.line() == "rank 2 lost on tray-00/2 (SIGKILL) -> tray-00/4 in 0.07 s, step 41 done again"


def test_a_failure_in_the_middle_of_a_recovery_overtakes_it_and_keeps_the_first_fault(story: Story) -> None:
    story.hears(exited("tray-00/2", 3))
    began = story.now
    story.does(breaking(2))
    story.hears(parked("tray-00/0", 1, 2))
    story.does(ResumeGeneration(plan=plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True)), because=""))
    story.hears(exited("tray-00/4", 9))
    story.does(breaking(3))
    story.does(ResumeGeneration(plan=plan(3, *FIRST.members[:2], member(2, "tray-00/5", 10, fresh=True)), because=""))
    story.finish()
    first, second = story.told_of
    assert (first.overtaken, second.overtaken) == (True, False)
    assert second.fault_ms == began
    assert second.lost[0].slot == "tray-00/4"


def test_a_rollback_names_every_step_that_is_done_again(story: Story) -> None:
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    rolled = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(12), rollback=9)
    story.does(ResumeGeneration(plan=rolled, because=""))
    story.commits(0, 1, 2, step=10, generation=2)
    (recovery,) = story.told_of
    assert recovery.redone == (10, 11, 12)
    assert "back to the state after step 9, steps 10 to 12 done again" in recovery.line()


def test_what_an_overtaken_recovery_had_to_do_again_is_done_again_for_the_one_that_follows(story: Story) -> None:
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    rolled = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(12), rollback=9)
    story.does(ResumeGeneration(plan=rolled, because=""))
    story.hears(exited("tray-00/4", 9))
    story.does(breaking(3))
    swapped = plan(3, *FIRST.members[:2], member(2, "tray-00/5", 10, fresh=True), committed=Position(9))
    story.does(ResumeGeneration(plan=swapped, because=""))
    story.finish()
    first, second = story.told_of
    assert (first.overtaken, first.redone, second.redone) == (True, (), (10, 11, 12))
    assert "done again" not in first.line()
    assert second.line().endswith(", steps 10 to 12 done again")


@pytest.mark.parametrize(
    ("begun", "redone"),
    [
        (Position(13), (10, 11, 12, 13)),
        (Position(12), (10, 11, 12)),  # all stood between two steps
        (Position(12, 1), (10, 11, 12)),  # a phase was broken
    ],
)
def test_the_step_that_was_broken_is_done_again_after_a_rollback_too(
    story: Story, begun: Position, redone: tuple[int, ...]
) -> None:
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    story.hears(parked("tray-00/0", 1, 2, Position(12)))
    story.hears(parked("tray-00/1", 2, 2, begun))
    rolled = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(12), rollback=9)
    story.does(ResumeGeneration(plan=rolled, because=""))
    story.commits(0, 1, 2, step=10, generation=2)
    assert story.told_of[0].redone == redone
    story.hears(exited("tray-00/4", 9))
    story.does(breaking(3))
    again = plan(3, *FIRST.members[:2], member(2, "tray-00/5", 10, fresh=True), committed=Position(10), rollback=9)
    story.does(ResumeGeneration(plan=again, because=""))
    story.commits(0, 1, 2, step=10, generation=3)
    assert story.told_of[1].redone == (10,), "what was begun before the first plan is no matter of the second"


@pytest.mark.parametrize(("step", "redone"), [(8, (6, 7, 8)), (7, (6, 7)), (-1, (6, 7))])
def test_the_step_in_which_a_member_ended_is_done_again_after_a_restart_too(
    story: Story, step: int, redone: tuple[int, ...]
) -> None:
    for done in range(8):
        story.commits(0, 1, 2, step=done, generation=1)
    spare = WorkerExited(slot=SlotId("tray-00/7"), incarnation=Incarnation(8), signal=9, step=Step(99))
    story.hears(spare)
    story.hears(WorkerExited(slot=SlotId("tray-00/2"), incarnation=Incarnation(3), signal=9, step=Step(step)))
    again = plan(2, member(0, "tray-00/0", 4), member(1, "tray-00/1", 5), member(2, "tray-00/2", 6))
    story.does(decided(Rung.RESTART, "restart: ...", start_s=1.0))
    story.does(ResumeGeneration(plan=again, because="restart 1 of 3"))
    resumes = {"slot": SlotId("tray-00/0"), "incarnation": Incarnation(4), "generation": Generation(2), "rank": Rank(0)}
    story.copied(StateCopied(**resumes, at=Position(5), kind="resume"))  # type: ignore[arg-type]
    story.commits(0, 1, 2, step=6, generation=2)
    assert story.told_of[0].redone == redone


def test_a_smaller_world_is_a_resize(story: Story) -> None:
    story.hears(TrayLost(tray=TrayId("tray-00"), because="its agent is gone"))
    story.does(breaking(2))
    story.does(ResumeGeneration(plan=plan(2, *FIRST.members[:2]), because=""))
    story.finish()
    (recovery,) = story.told_of
    assert recovery.kind == "resize"
    assert "rank 2 lost on tray-00/2 (tray lost: its agent is gone) -> 2 ranks go on" in recovery.line()


def test_who_is_ended_with_its_replica_is_not_lost(story: Story) -> None:
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    story.does(
        FenceWorker(slot=SlotId("tray-00/1"), incarnation=Incarnation(2), because="its replica", swept_along=True)
    )
    story.does(ResumeGeneration(plan=plan(2, *FIRST.members[:1]), because=""))
    story.finish()
    (recovery,) = story.told_of
    assert ([one.rank for one in recovery.lost], recovery.freed) == ([2], ("tray-00/1",))
    told = "rank 2 lost on tray-00/2 (SIGKILL); tray-00/1 will wait as a spare -> 1 rank goes on"
    assert recovery.line() == told


def test_a_stall_is_named_as_what_it_was_not_as_the_kill_that_ended_it(story: Story) -> None:
    stalled = WorkerStalled(
        slot=SlotId("tray-00/2"), incarnation=Incarnation(3), step=Step(4), collective=1, silent=True, for_ms=1200
    )
    story.hears(stalled)
    story.does(breaking(2))
    story.hears(exited("tray-00/2", 3))
    story.does(ResumeGeneration(plan=plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True)), because=""))
    story.finish()
    assert story.told_of[0].lost[0].how == "stalled for 1200 ms"


def stall(slot: str, incarnation: int, for_ms: int = 1200, **how: bool) -> WorkerStalled:
    who = {"slot": SlotId(slot), "incarnation": Incarnation(incarnation)}
    return WorkerStalled(**who, step=Step(4), collective=9, silent=False, for_ms=for_ms, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("early", [True, False])
def test_who_waited_for_the_one_that_stalled_was_not_lost(early: bool) -> None:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    story.hears(WorkerElastic(slot=SlotId("tray-00/0"), incarnation=Incarnation(1)))
    story.hears(stall("tray-00/0", 1, waiting=True, early=early))
    story.hears(stall("tray-00/2", 3, early=True))
    story.hears(stall("tray-00/2", 3, over=True))
    story.hears(stall("tray-00/1", 2, 30_000, early=early))
    story.does(breaking(2))
    story.hears(exited("tray-00/1", 2))
    again = plan(2, member(0, "tray-00/0", 4), member(1, "tray-00/1", 5), member(2, "tray-00/2", 6))
    story.does(ResumeGeneration(plan=again, because="restart"))
    story.finish()
    assert [one.how for one in story.told_of[0].lost if one.rank != 1] == ["gone", "gone"]
    assert next(one.how for one in story.told_of[0].lost if one.rank == 1) == "stalled for 30000 ms"


def test_a_restart_blames_who_fell_first_not_who_was_ended_for_it() -> None:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    story.hears(exited("tray-00/1", 2))
    began = story.now
    fenced = FenceWorker(slot=SlotId("tray-00/0"), incarnation=Incarnation(1), because="all again", swept_along=True)
    story.does(fenced)
    story.hears(exited("tray-00/0", 1))
    again = plan(2, member(0, "tray-00/0", 4), member(1, "tray-00/1", 5), member(2, "tray-00/2", 6))
    story.does(ResumeGeneration(plan=again, because="restart"))
    story.does(
        StartWorker(
            slot=SlotId("tray-00/0"),
            incarnation=Incarnation(4),
            spare=False,
            rank=Rank(0),
            world_size=3,
            generation=Generation(2),
            store="h:1",
            restarts=1,
        )
    )
    (recovery,) = story.told_of  # at once: a plain script does not tell when it computes again
    assert recovery.fault_ms == began
    assert recovery.line() == "rank 1 lost on tray-00/1 (SIGKILL) -> all 3 workers start again"


@pytest.mark.parametrize(("attempt", "redone"), [(1, ()), (2, (0,))])
def test_an_attempt_that_only_looked_for_a_scale_is_not_done_again_for_the_recovery(
    story: Story, attempt: int, redone: tuple[int, ...]
) -> None:
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    swapped = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True))
    story.does(ResumeGeneration(plan=swapped, because="swap"))
    for slot, incarnation in (("tray-00/0", 1), ("tray-00/1", 2), ("tray-00/4", 9)):
        story.hears(resumed(slot, incarnation, 2))
    story.commits(0, 1, 2, step=0, generation=2, attempt=attempt, rescaled=1)
    (recovery,) = story.told_of
    assert recovery.redone == redone
    assert ("done again" in recovery.line()) == bool(redone)


def test_a_restart_from_a_checkpoint_does_only_the_steps_after_it_again(story: Story) -> None:
    for step in range(8):
        story.commits(0, 1, 2, step=step, generation=1)
    again = plan(2, member(0, "tray-00/0", 4), member(1, "tray-00/1", 5), member(2, "tray-00/2", 6))
    story.does(decided(Rung.RESTART, "restart: ...", start_s=1.0))
    story.does(ResumeGeneration(plan=again, because="restart 1 of 3"))
    story.copied(
        StateCopied(
            slot=SlotId("tray-00/0"),
            incarnation=Incarnation(4),
            generation=Generation(2),
            rank=Rank(0),
            at=Position(5),
            kind="resume",
        )
    )
    story.commits(0, 1, 2, step=6, generation=2)
    (restart,) = story.told_of
    assert restart.redone == (6, 7)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_planned_swap_is_told_as_one_and_not_as_a_loss(on_gpus: bool) -> None:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    for rank in range(3):
        story.hears(
            WorkerPaused(slot=SlotId(f"tray-00/{rank}"), incarnation=Incarnation(rank + 1), generation=Generation(1))
        )
    because = "GPU 2 is degraded: NVLink 3 down (nvml)"
    first = CondemnWorker if on_gpus else FenceWorker
    story.does(first(slot=SlotId("tray-00/2"), incarnation=Incarnation(3), because=because))
    story.does(breaking(2))
    if on_gpus:
        story.does(FenceWorker(slot=SlotId("tray-00/2"), incarnation=Incarnation(3), because=because))
    story.does(ResumeGeneration(plan=plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True)), because=""))
    story.finish()
    (recovery,) = story.told_of
    assert recovery.planned
    assert [one.on_purpose for one in recovery.lost] == [True]
    assert recovery.line().startswith(f"rank 2 leaves tray-00/2 ({because}) -> tray-00/4")


def test_a_planned_swap_by_which_nothing_is_done_again_is_not_told_as_a_rollback() -> None:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    for rank in range(3):
        story.hears(
            WorkerPaused(slot=SlotId(f"tray-00/{rank}"), incarnation=Incarnation(rank + 1), generation=Generation(1))
        )
    story.does(FenceWorker(slot=SlotId("tray-00/2"), incarnation=Incarnation(3), because="drained"))
    story.does(breaking(2))
    after = plan(2, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(6), rollback=6)
    story.does(ResumeGeneration(plan=after, because=""))
    story.finish()
    (recovery,) = story.told_of
    assert recovery.line() == "rank 2 leaves tray-00/2 (drained) -> tray-00/4, goes on from the state after step 6"


def test_a_spare_that_ended_long_before_is_no_part_of_a_recovery() -> None:
    story = Story()
    story.does(ResumeGeneration(plan=FIRST, because="all are here"))
    story.hears(exited("tray-00/4", 9))
    story.now += 60_000
    story.hears(exited("tray-00/2", 3))
    began = story.now
    story.does(breaking(2))
    story.finish()
    assert story.told_of[0].fault_ms == began


def decided(rung: Rung, reason: str, **figures: float) -> Decided:
    return Decided(
        generation=Generation(2),
        failure=Failure(what="rank 1 lost (SIGKILL)", ranks=(Rank(1),)),
        decision=Decision(rung=rung, reason=reason, figures=figures),
    )


def test_what_was_predicted_is_held_against_what_it_took(story: Story) -> None:
    story.hears(exited("tray-00/1", 2))
    story.does(
        BreakGeneration(generation=Generation(2), workers=(worker("tray-00/0", 1),), because="rank 1 lost (SIGKILL)")
    )
    story.does(decided(Rung.WAIT, "wait: ...", wait_s=0.02, takeover_s=0.03, redone_s=0.1, goodput_gpu_s=9.0))
    at = story.now
    story.does(decided(Rung.SWAP, "swap: ...", takeover_s=0.03, redone_s=0.1))
    second = plan(2, member(0, "tray-00/0", 1), member(1, "tray-00/3", 4, fresh=True), member(2, "tray-00/2", 3))
    story.does(ResumeGeneration(plan=second, because="swap"))
    for slot, incarnation in (("tray-00/0", 1), ("tray-00/3", 4), ("tray-00/2", 3)):
        story.hears(resumed(slot, incarnation, 2))
    resumed_at = story.now
    story.commits(0, 1, 2, step=0, generation=2, attempt=1)
    (recovery,) = story.told_of
    assert (recovery.rungs, recovery.whose) == (("wait", "swap"), "hardware")
    assert recovery.predicted_gpu_s == pytest.approx(3 * 0.15)
    assert resumed_at < story.now
    recovery.measure(None)
    assert recovery.measured_gpu_s == pytest.approx(3 * (story.now - at) / 1e3), "the step that was done again is in it"


def test_the_time_of_a_hold_is_left_out_of_what_was_predicted_and_measured(story: Story) -> None:
    story.hears(exited("tray-00/1", 2))
    story.does(
        BreakGeneration(generation=Generation(2), workers=(worker("tray-00/0", 1),), because="rank 1 lost (SIGKILL)")
    )
    story.does(decided(Rung.HOLD, "hold: ...", wait_s=1800.0, takeover_s=0.03, redone_s=0.1))
    began = story.now
    story.now += 60_000
    story.does(decided(Rung.SWAP, "swap: ...", takeover_s=0.03, redone_s=0.1))
    ended = story.now
    second = plan(2, member(0, "tray-00/0", 1), member(1, "tray-00/3", 4, fresh=True), member(2, "tray-00/2", 3))
    story.does(ResumeGeneration(plan=second, because="swap"))
    for slot, incarnation in (("tray-00/0", 1), ("tray-00/3", 4), ("tray-00/2", 3)):
        story.hears(resumed(slot, incarnation, 2))
    story.commits(0, 1, 2, step=0, generation=2, attempt=1)
    (recovery,) = story.told_of
    assert recovery.held_ms == ended - began
    assert recovery.predicted_gpu_s == pytest.approx(3 * 0.13)
    recovery.measure(None)
    assert recovery.measured_gpu_s == pytest.approx(3 * (story.now - ended) / 1e3)
    assert " s of it in a hold" in recovery.line()


def test_a_job_that_is_stopped_in_a_hold_has_held_until_then(story: Story) -> None:
    story.hears(exited("tray-00/1", 2))
    story.does(
        BreakGeneration(generation=Generation(2), workers=(worker("tray-00/0", 1),), because="rank 1 lost (SIGKILL)")
    )
    story.does(decided(Rung.HOLD, "hold: ...", wait_s=1800.0))
    began = story.now
    story.now += 60_000
    story.does(StopJob(exit_code=143, because="rackctl stop"))
    ended = story.now
    story.finish()
    (recovery,) = story.told_of
    assert (recovery.held_ms, recovery.predicted_gpu_s) == (ended - began, None)
    assert recovery.ended_with_job
    assert recovery.line() == f"rank 1 lost (SIGKILL) -> the job ended, after {(ended - began) / 1e3:.2f} s in a hold"


def test_the_line_of_a_job_that_ended_names_all_ranks_that_were_lost(story: Story) -> None:
    story.hears(exited("tray-00/1", 2))
    story.does(
        BreakGeneration(generation=Generation(2), workers=(worker("tray-00/0", 1),), because="rank 1 lost (SIGKILL)")
    )
    story.hears(exited("tray-00/0", 1))
    failure = Failure(what="ranks 0, 1 lost (SIGKILL)", ranks=(Rank(0), Rank(1)))
    story.does(Decided(generation=Generation(2), failure=failure, decision=Decision(rung=Rung.STOP, reason="stop")))
    story.does(StopJob(exit_code=3, because="no copy of their state is left"))
    story.finish()
    (recovery,) = story.told_of
    assert recovery.line() == "ranks 0, 1 lost (SIGKILL) -> the job ended"


def test_a_step_that_was_in_hand_when_ranks_were_lost_is_not_done_again_for_the_growth_that_follows_at_once(
    story: Story,
) -> None:
    """The world goes on with fewer ranks, and all pause for a spare before they have done the broken step again."""
    story.hears(exited("tray-00/2", 3))
    story.does(breaking(2))
    smaller = plan(2, *FIRST.members[:2], committed=Position(29))
    story.does(ResumeGeneration(plan=smaller, because="shrink"))
    for rank in (0, 1):
        story.hears(resumed(f"tray-00/{rank}", rank + 1, 2))
    for rank in (0, 1):
        story.hears(
            WorkerPaused(slot=SlotId(f"tray-00/{rank}"), incarnation=Incarnation(rank + 1), generation=Generation(2))
        )
    story.does(
        BreakGeneration(
            generation=Generation(3), workers=(worker("tray-00/0", 1),), because="all pause, the world grows"
        )
    )
    grown = plan(3, *FIRST.members[:2], member(2, "tray-00/4", 9, fresh=True), committed=Position(29))
    story.does(ResumeGeneration(plan=grown, because="tray-00/4 joins"))
    for slot, incarnation in (("tray-00/0", 1), ("tray-00/1", 2), ("tray-00/4", 9)):
        story.hears(resumed(slot, incarnation, 3))
    assert story.told_of == [], "it is not known yet whether a step is done again"
    story.commits(0, 1, 2, step=30, generation=3, attempt=1)
    shrink, growth = story.told_of
    assert (shrink.redone, shrink.overtaken, growth.redone, growth.planned) == ((30,), False, (), True)
    assert shrink.line() == "rank 2 lost on tray-00/2 (SIGKILL) -> 2 ranks go on in 0.04 s, step 30 done again"
    assert growth.line() == "tray-00/4 joins at a step boundary -> 3 ranks go on in 0.05 s"
    assert story.last is growth


def test_after_a_rollback_the_steps_nobody_has_done_yet_count_as_undisturbed_ones() -> None:
    back = RecoveryRecord(
        generation=2,
        kind="swap",
        because="",
        fault_ms=0.0,
        decided_ms=1e3,
        resumed_ms=3e3,
        world_size=4,
        redone=(5, 6, 7),
    )
    back.measure(None)
    assert back.measured_gpu_s is None, "nobody knows what a step takes"
    back.committed_ms = 3.5e3
    back.measure(0.25)
    assert back.measured_gpu_s == pytest.approx(4 * (2.5 + 2 * 0.25))
    back.overtaken, back.measured_gpu_s = True, None
    back.measure(0.25)
    assert back.measured_gpu_s is None


def test_a_restart_that_was_decided_before_anybody_was_broken_is_one_of_its_own(story: Story) -> None:
    """A recovery before it may wait for commits still."""
    story.does(breaking(2))
    story.does(decided(Rung.SWAP, "swap: ...", takeover_s=1.0))
    second = plan(2, member(0, "tray-00/0", 1), member(1, "tray-00/1", 2), member(2, "tray-00/3", 4, fresh=True))
    story.does(ResumeGeneration(plan=second, because="swap"))
    story.does(decided(Rung.RESTART, "restart: ...", start_s=1.0))
    third = plan(3, member(0, "tray-00/0", 5), member(1, "tray-00/1", 6), member(2, "tray-00/3", 7))
    story.does(ResumeGeneration(plan=third, because="restart 1 of 3"))
    start = StartWorker(
        slot=SlotId("tray-00/0"),
        incarnation=Incarnation(5),
        rank=Rank(0),
        spare=False,
        world_size=3,
        generation=Generation(3),
        store="",
        restarts=1,
    )
    story.does(start)
    story.commits(0, 1, 2, step=0, generation=3)
    swap, restart = story.told_of
    assert (swap.rungs, swap.kind, swap.overtaken) == (("swap",), "swap", True)
    assert (restart.rungs, restart.kind, restart.generation) == (("restart",), "restart", 3)
    restart.measure(None)
    assert restart.predicted_gpu_s == 3.0
    assert restart.measured_gpu_s is not None


@pytest.mark.parametrize("heard", ["with it", "later"])
def test_a_recovery_whose_resumption_is_heard_with_its_first_step_or_later_has_a_measured_cost(
    story: Story, heard: str
) -> None:
    """Both steps are done again, and nobody has seen an undisturbed one yet."""
    story.commits(0, 1, 2, step=0, generation=1)
    story.does(breaking(2))
    story.hears(parked("tray-00/0", 1, 2, begun=Position(1)))
    story.does(decided(Rung.SWAP, "swap: ...", takeover_s=1.0))
    ranks = (("tray-00/0", 1), ("tray-00/1", 2), ("tray-00/3", 4))
    again = plan(2, *(member(rank, slot, of) for rank, (slot, of) in enumerate(ranks)), rollback=-1)
    story.does(ResumeGeneration(plan=again, because="swap"))
    planned, story.now = story.now, story.now + 1000
    if heard == "with it":
        story.now += 10
        for slot, incarnation in ranks:
            story.on_event(resumed(slot, incarnation, 2), story.now)
    for rank in range(3):
        story.committed(msgspec.structs.replace(unit(0, rank, generation=2), seconds=0.4), story.now)
    (swap,) = story.told_of
    assert swap.redone == (0, 1)
    swap.measure(None)
    assert swap.measured_gpu_s is not None
    assert swap.measured_gpu_s > 3 * (story.now - planned + 400) / 1e3


def test_a_rank_with_wrong_bits_is_taken_out_and_not_lost(story: Story) -> None:
    because = "its state differs from that of its replicas, seen in step 8"
    who: list[dict[str, Any]] = [
        {"slot": SlotId(f"tray-00/{rank}"), "incarnation": Incarnation(rank + 1)} for rank in range(3)
    ]
    teller, crashed, wrong = who
    story.hears(
        ReplicasDiffer(**teller, generation=Generation(1), at=Position(8), culprits=(Rank(2),), good=Position(3))
    )
    story.does(FenceWorker(**wrong, because=because))
    story.does(breaking(2))
    story.hears(WorkerExited(**wrong, signal=9))
    story.hears(WorkerExited(**crashed, signal=11))
    story.does(
        ResumeGeneration(
            plan=plan(
                2, FIRST.members[0], member(1, "tray-00/4", 8, fresh=True), member(2, "tray-00/5", 9, fresh=True)
            ),
            because="",
        )
    )
    story.finish()
    (recovery,) = story.told_of
    assert [(one.rank, one.on_purpose) for one in recovery.lost] == [(1, False), (2, True)]
    assert "rank 1 lost on tray-00/1 (SIGSEGV)" in recovery.line()
    assert f"rank 2 taken out on tray-00/2 ({because}) -> tray-00/5" in recovery.line()
