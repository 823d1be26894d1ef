"""A world that shrinks and grows, event by event: what the coordinator asks of ranks, and when it does not."""

from __future__ import annotations

import msgspec
import pytest

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import World
from rackrun.core.lifecycle.batch_notices import BatchNotices
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import (
    BreakGeneration,
    Command,
    FenceWorker,
    PauseWorkers,
    ResumeGeneration,
    SetTimer,
    StopJob,
)
from rackrun.protocol.events import BatchChanged, ShrinkRequested
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, snapshot_id
from rackrun.protocol.job_config import JobConfig
from tests.core.core_followed import FollowedCore
from tests.core.core_told import Told, every, only, plan_in, ranks

IN_PLACE, AGAIN = "in place", "entering main again"
RULES = parse_rules("swap,shrink,wait,restart")


def resizing(how: str, **settings: object) -> Told:
    """One tray of four slots, all of them ranks."""
    config = JobConfig(trays_min=1, trays_max=1, **({"spares": 0, "min_ranks": 1, "rules": RULES} | settings))
    told = Told(config)  # type: ignore[arg-type]
    told.core = FollowedCore(config)  # type: ignore[arg-type]
    told.resizes = how
    told.join("a", 4)
    return told


def shrinks(told: Told, *slots: str) -> ResumeGeneration:
    """The workers in these slots are lost, and nobody takes over."""
    for slot in slots:
        told.exits(slot, snapshots=[4])
    return only(ResumeGeneration, told.park_all(snapshots=[4]))


def test_what_the_script_said_of_its_mesh_before_the_shrink_and_is_heard_after_it_ends_nothing() -> None:
    told = resizing(IN_PLACE)
    told.train()
    told.ready("a/0", "all-0", {"dp": 4})
    assert shrinks(told, "a/3").plan.world_size == 3
    assert not every(StopJob, told.ready("a/0", "all-0", {"dp": 4}))
    told.resume_all()
    assert not every(StopJob, told.ready("a/0", "all-0", {"dp": 3}))
    assert told.view.phase == "training"


@pytest.mark.parametrize("axes", [(), (("dp", 4),)])
def test_afterwards_a_world_that_has_shrunk_is_seen_with_the_mesh_that_it_had_then(
    axes: tuple[tuple[str, int], ...],
) -> None:
    told = resizing(IN_PLACE, mesh=axes)
    told.train()
    shrinks(told, "a/1")
    told.resume_all()
    assert told.view.world_size == 3
    past = told.core.past
    past.finish()
    assert past.seating.mesh == told.core._job.seating.mesh
    assert past.seating.where(past.seats, 2)
    assert past.successors(2) == []


@pytest.mark.parametrize("most", [1, 4])
def test_who_takes_over_is_known_beforehand_one_spare_after_the_other(most: int) -> None:
    told = resizing(IN_PLACE, spares=2)
    told.train()
    past = told.core.past
    spares = past.ready()
    assert len(spares) == 2
    assert [staff.seats for staff in past.successors(Rank(0), most)] == [{0: spare} for spare in spares[:most]]
    told.exits(told.view.ranks[0].slot)
    assert plan_in(told.park_all()).members[0].slot == spares[0]


def clique_of(slot: str) -> str:
    return "x" if slot[0] in "ab" else "y"


def pairs_in_two_cliques() -> Told:
    """Trays a, b in clique x and c, d in clique y, two slots each. A pair of each clique has lost a GPU, for good."""
    told = Told(JobConfig(trays_min=4, trays_max=4, spares=0, min_ranks=1, rules=RULES, mesh=(("dp", 4), ("tp", 2))))
    told.resizes = AGAIN
    for tray in "abcd":
        told.join(tray, 2, clique=clique_of(tray))
    told.train("pair")
    for slot in ("a/0", "c/0"):
        told.checks(slot, "its memory is bad")
        told.exits(slot, snapshots=[4])
    assert ranks(plan_in(told.park_all(snapshots=[4]))) == {0: "b/0", 1: "b/1", 2: "d/0", 3: "d/1"}
    for slot in ("a/1", "c/1"):
        told.exits(slot)
    told.resume_all()
    return told


def test_whoever_is_left_over_in_two_cliques_is_no_pair() -> None:
    told = pairs_in_two_cliques()
    told.ready("a/1")
    assert not every(PauseWorkers, told.ready("c/1"))


def test_a_pair_that_joins_is_of_one_clique() -> None:
    told = pairs_in_two_cliques()
    told.ready("a/1")
    told.ready("c/1")
    told.checks("c/0")
    assert only(PauseWorkers, told.ready("c/0")).because == "c/0, c/1"
    told.pause_all()
    plan = plan_in(told.park_all(passed=6, snapshots=[6], layout=2))
    assert ranks(plan) == {0: "b/0", 1: "b/1", 2: "d/0", 3: "d/1", 4: "c/0", 5: "c/1"}


def grows(told: Told, slot: str, layout: int) -> None:
    told.ready(slot)
    told.pause_all()
    plan_in(told.park_all(snapshots=[4], layout=layout))
    told.resume_all()


def patience_ms(told: Told, *slots: str, layout: int) -> int:
    """Of the recovery from these losses."""
    for slot in slots:
        told.exits(slot, snapshots=[snapshot_id(Generation(layout), Step(4))])
    timers = every(SetTimer, told.park_all(snapshots=[4], layout=layout))
    return next(timer.at_ms - told.now for timer in timers if str(timer.timer).startswith("resume"))


def test_a_spare_that_has_to_enter_main_again_for_its_place_has_the_time_of_a_start() -> None:
    told = Told(JobConfig(trays_min=1, trays_max=1, spares=1, min_ranks=1, rules=RULES))
    told.resizes = AGAIN
    told.join("a", 5)
    for slot in told.members:
        told.ready(slot)
    for slot in ("a/2", "a/3"):
        told.exits(slot, snapshots=[4])
    assert plan_in(told.park_all(snapshots=[4])).world_size == 2
    told.resume_all()
    grows(told, "a/4", layout=2)
    grows(told, "a/2", layout=3)
    assert told.view.world_size == 4
    told.ready("a/3")  # it has built its model for a world of two
    assert patience_ms(told, "a/0", layout=4) == 300_000
    told.resume_all()
    told.ready("a/0")  # this one, for four
    assert patience_ms(told, "a/1", layout=4) == 30_000


def test_what_those_leave_who_had_to_go_with_a_lost_rank_counts_until_all_have_new_shards() -> None:
    """Its tray lives, and that of the other copy does not."""
    told = Told(JobConfig(trays_min=4, trays_max=4, spares=0, min_ranks=1, rules=RULES, mesh=(("dp", 2), ("tp", 2))))
    told.resizes = AGAIN
    for tray in "abcd":
        told.join(tray, 1)
    told.train("pair")
    told.exits("a/0", snapshots=[4])
    assert ranks(plan_in(told.park_all(snapshots=[4]))) == {0: "c/0", 1: "d/0"}
    told.exits("b/0", snapshots=[4])
    told.tray_lost("d")
    told.timer("gather")
    told.parks("c/0", snapshots=[4])
    of = plan_in(told.ready("a/0")).reshard
    assert of is not None
    assert of.images[1] == of.images[3] == "b:2/b/0/2"


def test_a_plan_says_which_worlds_have_committed_what_and_which_is_to_come() -> None:
    told = resizing(IN_PLACE)
    told.train()
    assert told.core._job.world.plan.worlds == ((Step(0), 4),)
    plan = shrinks(told, "a/3").plan
    assert (plan.full, plan.worlds) == (4, ((Step(0), 4), (Step(plan.committed.step + 1), 3)))


def test_what_was_committed_belongs_to_the_world_that_did_it_though_all_go_back_or_begin_again() -> None:
    world = World(size=4, full=4)
    assert world.go_on_after(BEGIN) == ((0, 4),)
    world.size = 3
    assert world.go_on_after(Position(9)) == ((0, 4), (10, 3))
    assert world.go_on_after(Position(6)) == ((0, 4), (10, 3)), "a rollback"
    assert world.go_on_after(BEGIN) == ((0, 4), (10, 3)), "a restart"
    world.size = 2
    assert world.go_on_after(Position(7)) == ((0, 4), (10, 2)), "nobody has committed step 10"
    world.size = 4
    assert world.go_on_after(Position(9)) == ((0, 4),)
    assert world.go_on_after(Position(20, 1)) == ((0, 4),)


def test_a_world_that_begins_again_does_what_it_may_have_committed_as_the_worlds_before_did() -> None:
    """Nobody is left who could say how far that was, but workers were seen to end in step 9."""
    told = resizing(IN_PLACE, start_over=True)
    told.train()
    told.checks("a/3", "its memory is bad")
    plan = shrinks(told, "a/3").plan
    told.resume_all()
    for slot in told.members:
        told.exits(slot, step=9)
    told.timer("gather")
    assert (told.view.restarts, told.view.phase) == (1, "setup")
    again = told.core._job.world.plan
    assert again is not None
    assert (again.world_size, again.worlds) == (3, plan.worlds)
    told.train()
    assert shrinks(told, told.members[-1]).plan.worlds == (*plan.worlds, (Step(10), 2))


def test_another_batch_is_told_once() -> None:
    out = Outbox()
    notices = BatchNotices(out)
    event = BatchChanged(
        slot=SlotId("a/0"),
        incarnation=Incarnation(1),
        step=Step(12),
        batch=24,
        full_batch=32,
        factor=0.75,
        target=0.75,
        rule="linear",
    )
    for slot in ("a/0", "a/1", "a/2"):
        notices.report(msgspec.structs.replace(event, slot=SlotId(slot)))
    notices.report(msgspec.structs.replace(event, step=Step(20), batch=32, factor=0.8, target=1.0))
    assert [notice.text for notice in out.take()] == [  # type: ignore[union-attr]
        "from step 12 on the global batch is 24 of 32 samples, and learning rates are multiplied by 0.75 (linear)",
        "from step 20 on the global batch is 32 of 32 samples, and learning rates are multiplied by 1 (linear), rising from 0.8",
    ]


def entering_on_three_trays(*, ended: bool = True) -> Told:
    """A rank on each; all have a copy of step 4 on the next tray, and are entering main again after step 7, without rank 1. ``ended``: its end
    has been heard."""
    told = Told(JobConfig(trays_min=3, trays_max=3, spares=0, min_ranks=1, rules=RULES))
    told.resizes = AGAIN
    for tray in "abc":
        told.join(tray, 1)
    told.train("unique")
    for slot, holder in (("a/0", "b"), ("b/0", "c"), ("c/0", "a")):
        told.mirrors(slot, holder, 4)
    told.tell(ShrinkRequested(request="1", ranks=(Rank(1),), steps=9))
    told.pause_all()
    plan = plan_in(told.park_all(7, snapshots=[4, 7]))
    assert (plan.committed.step, plan.rollback, plan.world_size) == (7, None, 2)
    if ended:
        told.exits("b/0", snapshots=[4, 7])
    return told


def test_a_tray_that_is_lost_while_all_enter_main_again_takes_all_back_to_what_is_on_others() -> None:
    """What was handed over is on its own tray only. What all have elsewhere is overwritten when all have filled their new state, no sooner."""
    told = entering_on_three_trays()
    told.tray_lost("c")
    told.timer("gather")
    plan = plan_in(told.parks("a/0", 7, snapshots=[4, 7]))
    assert (plan.world_size, plan.rollback, plan.committed.step) == (1, 4, 4)
    assert plan.reshard is not None
    assert plan.reshard.images == ("a:2/a/0/1", "b:2/b/0/2", "a:2/c/0/3")


def test_what_one_had_sealed_that_leaves_is_read_from_its_agent_whatever_is_said_at_its_end() -> None:
    told = entering_on_three_trays(ended=False)
    told.exits("c/0", snapshots=[4, 7])
    told.park_all(7, snapshots=[4, 7])
    plan = plan_in(told.exits("b/0"))
    assert (plan.world_size, plan.committed.step) == (1, 7)
    assert plan.reshard is not None
    assert plan.reshard.images == ("a:2/a/0/1", "b:2/b/0/2", "c:2/c/0/3")


# -- who is whose replica --------------------------------------------------------------------------------------------
def test_one_that_was_never_compared_after_the_first_step_does_not_go_on_alone() -> None:
    """What the lost one had may be in no other place."""
    told = resizing(IN_PLACE)
    told.train()
    for slot in ("a/1", "a/2", "a/3"):
        told.exits(slot)
    told.ready("a/0", "unchecked rank 0")
    assert not every(ResumeGeneration, told.park_all(passed=1))


def test_one_that_goes_on_alone_is_joined_by_others() -> None:
    told = resizing(IN_PLACE)
    told.train()
    assert shrinks(told, "a/1", "a/2", "a/3").plan.world_size == 1
    told.resume_all()
    told.ready("a/0", "what it is after the first step")
    assert every(PauseWorkers, told.ready("a/1"))


@pytest.mark.parametrize("tray", [False, True], ids=["its process", "its tray"])
def test_what_one_had_that_was_alone_is_had_from_its_snapshots(tray: bool) -> None:
    told = Told(JobConfig(trays_min=2, trays_max=2, spares=0, min_ranks=1, rules=RULES))
    told.resizes = IN_PLACE
    told.join("a", 1)
    told.join("b", 1)
    told.train()
    told.exits("b/0")
    told.park_all()
    told.resume_all()
    told.mirrors("a/0", "b", 5)
    if tray:
        told.tray_lost("a")
    else:
        told.exits("a/0", step=20, snapshots=[5, 6])
    told.timer("gather")
    plan = plan_in(told.ready("b/0"))
    (restore,) = plan.restores
    assert (plan.world_size, plan.rollback) == (1, 5 if tray else 6)
    assert restore.snapshot == ("b:2/a/0/1" if tray else "a:2/a/0/1")


# -- somebody hangs in main ------------------------------------------------------------------------------------------
def entering_again() -> Told:
    """Three of four."""
    told = resizing(AGAIN)
    told.train("unique")
    assert shrinks(told, "a/3").plan.reshard is not None
    return told


def judged(told: Told) -> list[Command]:
    return [*told.timer("stalled"), *told.timer("judge")]


def test_who_stands_in_main_while_the_others_wait_is_lost() -> None:
    told = entering_again()
    assert not every(FenceWorker, told.stalls("a/1", 2))
    (fenced,) = every(FenceWorker, judged(told))
    assert (fenced.slot, fenced.fault) == ("a/1", True)
    assert fenced.because == "not at run.steps() again, for 700 ms in main"


def test_of_several_the_first_that_did_not_go_on_is() -> None:
    told = entering_again()
    told.stalls("a/0", 3)
    told.stalls("a/1", 2)
    assert [fenced.slot for fenced in every(FenceWorker, judged(told))] == ["a/1"]


def test_when_most_stand_there_the_machine_is_slow_and_nobody_is_lost() -> None:
    told = entering_again()
    told.stalls("a/0", 2)
    told.stalls("a/1", 2)
    assert not every(FenceWorker, judged(told))
    told.resumes("a/1")
    assert [fenced.slot for fenced in every(FenceWorker, told.stalls("a/0", 2))] == ["a/0"]


def test_who_has_come_through_after_all_is_not_blamed_for_it_when_all_train() -> None:
    told = entering_again()
    told.stalls("a/1", 2)
    told.resume_all()
    assert told.view.phase == "training"
    assert not every(BreakGeneration, judged(told))


def test_what_it_has_handed_over_is_waited_for_until_it_has_ended() -> None:
    told = entering_again()
    told.stalls("a/1", 2)
    judged(told)
    out = told.park_all(snapshots=[4])
    assert not every(ResumeGeneration, out)
    assert not every(StopJob, out)
    plan = plan_in(told.exits("a/1", snapshots=[4]))
    assert plan.world_size == 2
    assert plan.reshard is not None
    assert plan.reshard.images[1] == "a:2/a/1/2"
