"""A world that shrinks and grows, event by event: what the coordinator asks of ranks, and when it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import World
from rackrun.core.lifecycle.batch_notices import BatchNotices
from rackrun.core.machine.state_replay import StateReplay
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
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks

IN_PLACE, AGAIN = "in place", "entering main again"
RULES = parse_rules("swap,shrink,wait,restart")


def resizing(how: str, **settings: Any) -> CoreHarness:
    """One tray of four slots, all of them ranks."""
    fields: dict[str, Any] = {"spares": 0, "min_ranks": 1, "rules": RULES}
    config = JobConfig(trays_min=1, trays_max=1, **(fields | settings))
    harness = CoreHarness(config)
    harness.core = FollowedCore(config)
    harness.resizes = how
    harness.join("a", 4)
    return harness


def past_of(harness: CoreHarness) -> StateReplay:
    assert isinstance(harness.core, FollowedCore)
    return harness.core.past


def shrinks(harness: CoreHarness, *slots: str) -> ResumeGeneration:
    """The workers in these slots are lost, and nobody takes over."""
    for slot in slots:
        harness.exits(slot, snapshots=[4])
    return only(ResumeGeneration, harness.park_all(snapshots=[4]))


def test_what_the_script_said_of_its_mesh_before_the_shrink_and_is_heard_after_it_ends_nothing() -> None:
    harness = resizing(IN_PLACE)
    harness.train()
    harness.ready("a/0", "all-0", {"dp": 4})
    assert shrinks(harness, "a/3").plan.world_size == 3
    assert not every(StopJob, harness.ready("a/0", "all-0", {"dp": 4}))
    harness.resume_all()
    assert not every(StopJob, harness.ready("a/0", "all-0", {"dp": 3}))
    assert harness.view.phase == "training"


@pytest.mark.parametrize("axes", [(), (("dp", 4),)])
def test_afterwards_a_world_that_has_shrunk_is_seen_with_the_mesh_that_it_had_then(
    axes: tuple[tuple[str, int], ...],
) -> None:
    harness = resizing(IN_PLACE, mesh=axes)
    harness.train()
    shrinks(harness, "a/1")
    harness.resume_all()
    assert harness.view.world_size == 3
    past = past_of(harness)
    past.finish()
    assert past.seating.mesh == harness.core._job.seating.mesh
    assert past.seating.where(past.seats, Rank(2))
    assert past.successors(Rank(2)) == []


@pytest.mark.parametrize("most", [1, 4])
def test_who_takes_over_is_known_beforehand_one_spare_after_the_other(most: int) -> None:
    harness = resizing(IN_PLACE, spares=2)
    harness.train()
    past = past_of(harness)
    spares = past.ready()
    assert len(spares) == 2
    assert [staff.seats for staff in past.successors(Rank(0), most)] == [{0: spare} for spare in spares[:most]]
    harness.exits(harness.view.ranks[0].slot)
    assert plan_in(harness.park_all()).members[0].slot == spares[0]


def clique_of(slot: str) -> str:
    return "x" if slot[0] in "ab" else "y"


def pairs_in_two_cliques() -> CoreHarness:
    """Trays a, b in clique x and c, d in clique y, two slots each. A pair of each clique has lost a GPU, for good."""
    harness = CoreHarness(
        JobConfig(trays_min=4, trays_max=4, spares=0, min_ranks=1, rules=RULES, mesh=(("dp", 4), ("tp", 2)))
    )
    harness.resizes = AGAIN
    for tray in "abcd":
        harness.join(tray, 2, clique=clique_of(tray))
    harness.train("pair")
    for slot in ("a/0", "c/0"):
        harness.checks(slot, "its memory is bad")
        harness.exits(slot, snapshots=[4])
    assert ranks(plan_in(harness.park_all(snapshots=[4]))) == {0: "b/0", 1: "b/1", 2: "d/0", 3: "d/1"}
    for slot in ("a/1", "c/1"):
        harness.exits(slot)
    harness.resume_all()
    return harness


def test_whoever_is_left_over_in_two_cliques_is_no_pair() -> None:
    harness = pairs_in_two_cliques()
    harness.ready("a/1")
    assert not every(PauseWorkers, harness.ready("c/1"))


def test_a_pair_that_joins_is_of_one_clique() -> None:
    harness = pairs_in_two_cliques()
    harness.ready("a/1")
    harness.ready("c/1")
    harness.checks("c/0")
    assert only(PauseWorkers, harness.ready("c/0")).because == "c/0, c/1"
    harness.pause_all()
    plan = plan_in(harness.park_all(passed=6, snapshots=[6], layout=2))
    assert ranks(plan) == {0: "b/0", 1: "b/1", 2: "d/0", 3: "d/1", 4: "c/0", 5: "c/1"}


def grows(harness: CoreHarness, slot: str, layout: int) -> None:
    harness.ready(slot)
    harness.pause_all()
    plan_in(harness.park_all(snapshots=[4], layout=layout))
    harness.resume_all()


def patience_ms(harness: CoreHarness, *slots: str, layout: int) -> int:
    """Of the recovery from these losses."""
    for slot in slots:
        harness.exits(slot, snapshots=[snapshot_id(Generation(layout), Step(4))])
    timers = every(SetTimer, harness.park_all(snapshots=[4], layout=layout))
    return next(timer.at_ms - harness.now for timer in timers if str(timer.timer).startswith("resume"))


def test_a_spare_that_has_to_enter_main_again_for_its_place_has_the_time_of_a_start() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1, min_ranks=1, rules=RULES))
    harness.resizes = AGAIN
    harness.join("a", 5)
    for slot in harness.members:
        harness.ready(slot)
    for slot in ("a/2", "a/3"):
        harness.exits(slot, snapshots=[4])
    assert plan_in(harness.park_all(snapshots=[4])).world_size == 2
    harness.resume_all()
    grows(harness, "a/4", layout=2)
    grows(harness, "a/2", layout=3)
    assert harness.view.world_size == 4
    harness.ready("a/3")  # it has built its model for a world of two
    assert patience_ms(harness, "a/0", layout=4) == 300_000
    harness.resume_all()
    harness.ready("a/0")  # this one, for four
    assert patience_ms(harness, "a/1", layout=4) == 30_000


def test_what_those_leave_who_had_to_go_with_a_lost_rank_counts_until_all_have_new_shards() -> None:
    """Its tray lives, and that of the other copy does not."""
    harness = CoreHarness(
        JobConfig(trays_min=4, trays_max=4, spares=0, min_ranks=1, rules=RULES, mesh=(("dp", 2), ("tp", 2)))
    )
    harness.resizes = AGAIN
    for tray in "abcd":
        harness.join(tray, 1)
    harness.train("pair")
    harness.exits("a/0", snapshots=[4])
    assert ranks(plan_in(harness.park_all(snapshots=[4]))) == {0: "c/0", 1: "d/0"}
    harness.exits("b/0", snapshots=[4])
    harness.tray_lost("d")
    harness.timer("gather")
    harness.parks("c/0", snapshots=[4])
    of = plan_in(harness.ready("a/0")).reshard
    assert of is not None
    assert of.images[1] == of.images[3] == "b:2/b/0/2"


def test_a_plan_says_which_worlds_have_committed_what_and_which_is_to_come() -> None:
    harness = resizing(IN_PLACE)
    harness.train()
    first = harness.core._job.world.plan
    assert first is not None
    assert first.worlds == ((Step(0), 4),)
    plan = shrinks(harness, "a/3").plan
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
    harness = resizing(IN_PLACE, start_over=True)
    harness.train()
    harness.checks("a/3", "its memory is bad")
    plan = shrinks(harness, "a/3").plan
    harness.resume_all()
    for slot in harness.members:
        harness.exits(slot, step=9)
    harness.timer("gather")
    assert (harness.view.restarts, harness.view.phase) == (1, "setup")
    again = harness.core._job.world.plan
    assert again is not None
    assert (again.world_size, again.worlds) == (3, plan.worlds)
    harness.train()
    assert shrinks(harness, harness.members[-1]).plan.worlds == (*plan.worlds, (Step(10), 2))


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


def entering_on_three_trays(*, ended: bool = True) -> CoreHarness:
    """A rank on each; all have a copy of step 4 on the next tray, and are entering main again after step 7, without rank 1. ``ended``: its end
    has been heard."""
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=0, min_ranks=1, rules=RULES))
    harness.resizes = AGAIN
    for tray in "abc":
        harness.join(tray, 1)
    harness.train("unique")
    for slot, holder in (("a/0", "b"), ("b/0", "c"), ("c/0", "a")):
        harness.mirrors(slot, holder, 4)
    harness.tell(ShrinkRequested(request="1", ranks=(Rank(1),), steps=9))
    harness.pause_all()
    plan = plan_in(harness.park_all(7, snapshots=[4, 7]))
    assert (plan.committed.step, plan.rollback, plan.world_size) == (7, None, 2)
    if ended:
        harness.exits("b/0", snapshots=[4, 7])
    return harness


def test_a_tray_that_is_lost_while_all_enter_main_again_takes_all_back_to_what_is_on_others() -> None:
    """What was handed over is on its own tray only. What all have elsewhere is overwritten when all have filled their new state, no sooner."""
    harness = entering_on_three_trays()
    harness.tray_lost("c")
    harness.timer("gather")
    plan = plan_in(harness.parks("a/0", 7, snapshots=[4, 7]))
    assert (plan.world_size, plan.rollback, plan.committed.step) == (1, 4, 4)
    assert plan.reshard is not None
    assert plan.reshard.images == ("a:2/a/0/1", "b:2/b/0/2", "a:2/c/0/3")


def test_what_one_had_sealed_that_leaves_is_read_from_its_agent_whatever_is_said_at_its_end() -> None:
    harness = entering_on_three_trays(ended=False)
    harness.exits("c/0", snapshots=[4, 7])
    harness.park_all(7, snapshots=[4, 7])
    plan = plan_in(harness.exits("b/0"))
    assert (plan.world_size, plan.committed.step) == (1, 7)
    assert plan.reshard is not None
    assert plan.reshard.images == ("a:2/a/0/1", "b:2/b/0/2", "c:2/c/0/3")


# -- who is whose replica --------------------------------------------------------------------------------------------
def test_one_that_was_never_compared_after_the_first_step_does_not_go_on_alone() -> None:
    """What the lost one had may be in no other place."""
    harness = resizing(IN_PLACE)
    harness.train()
    for slot in ("a/1", "a/2", "a/3"):
        harness.exits(slot)
    harness.ready("a/0", "unchecked rank 0")
    assert not every(ResumeGeneration, harness.park_all(passed=1))


def test_one_that_goes_on_alone_is_joined_by_others() -> None:
    harness = resizing(IN_PLACE)
    harness.train()
    assert shrinks(harness, "a/1", "a/2", "a/3").plan.world_size == 1
    harness.resume_all()
    harness.ready("a/0", "what it is after the first step")
    assert every(PauseWorkers, harness.ready("a/1"))


@pytest.mark.parametrize("tray", [False, True], ids=["its process", "its tray"])
def test_what_one_had_that_was_alone_is_had_from_its_snapshots(tray: bool) -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, min_ranks=1, rules=RULES))
    harness.resizes = IN_PLACE
    harness.join("a", 1)
    harness.join("b", 1)
    harness.train()
    harness.exits("b/0")
    harness.park_all()
    harness.resume_all()
    harness.mirrors("a/0", "b", 5)
    if tray:
        harness.tray_lost("a")
    else:
        harness.exits("a/0", step=20, snapshots=[5, 6])
    harness.timer("gather")
    plan = plan_in(harness.ready("b/0"))
    (restore,) = plan.restores
    assert (plan.world_size, plan.rollback) == (1, 5 if tray else 6)
    assert restore.snapshot == ("b:2/a/0/1" if tray else "a:2/a/0/1")


# -- somebody hangs in main ------------------------------------------------------------------------------------------
def entering_again() -> CoreHarness:
    """Three of four."""
    harness = resizing(AGAIN)
    harness.train("unique")
    assert shrinks(harness, "a/3").plan.reshard is not None
    return harness


def judged(harness: CoreHarness) -> list[Command]:
    return [*harness.timer("stalled"), *harness.timer("judge")]


def test_who_stands_in_main_while_the_others_wait_is_lost() -> None:
    harness = entering_again()
    assert not every(FenceWorker, harness.stalls("a/1", 2))
    (fenced,) = every(FenceWorker, judged(harness))
    assert (fenced.slot, fenced.fault) == ("a/1", True)
    assert fenced.because == "not at run.steps() again, for 700 ms in main"


def test_of_several_the_first_that_did_not_go_on_is() -> None:
    harness = entering_again()
    harness.stalls("a/0", 3)
    harness.stalls("a/1", 2)
    assert [fenced.slot for fenced in every(FenceWorker, judged(harness))] == ["a/1"]


def test_when_most_stand_there_the_machine_is_slow_and_nobody_is_lost() -> None:
    harness = entering_again()
    harness.stalls("a/0", 2)
    harness.stalls("a/1", 2)
    assert not every(FenceWorker, judged(harness))
    harness.resumes("a/1")
    assert [fenced.slot for fenced in every(FenceWorker, harness.stalls("a/0", 2))] == ["a/0"]


def test_who_has_come_through_after_all_is_not_blamed_for_it_when_all_train() -> None:
    harness = entering_again()
    harness.stalls("a/1", 2)
    harness.resume_all()
    assert harness.view.phase == "training"
    assert not every(BreakGeneration, judged(harness))


def test_what_it_has_handed_over_is_waited_for_until_it_has_ended() -> None:
    harness = entering_again()
    harness.stalls("a/1", 2)
    judged(harness)
    out = harness.park_all(snapshots=[4])
    assert not every(ResumeGeneration, out)
    assert not every(StopJob, out)
    plan = plan_in(harness.exits("a/1", snapshots=[4]))
    assert plan.world_size == 2
    assert plan.reshard is not None
    assert plan.reshard.images[1] == "a:2/a/1/2"
