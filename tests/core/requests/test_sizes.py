"""How many ranks a person may ask for, what comes of it, and why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.core.resize.growth_backoff import PAUSE_MS
from rackrun.protocol.commands import (
    Answer,
    BreakGeneration,
    Command,
    Decided,
    FenceWorker,
    Notice,
    PauseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
)
from rackrun.protocol.events import GrowRequested, ShrinkRequested, StopRequested, SwapRequested, TimerFired
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation, Position, Rank, SlotId, Step, snapshot_id
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named
from tests.core.core_followed import FollowedCore
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks

IN_PLACE, AGAIN = "in place", "entering main again"
BOTH = pytest.mark.parametrize("how", [IN_PLACE, AGAIN])
RULES = parse_rules("swap,shrink,wait,restart")


class Sized(CoreHarness):
    requests = 0

    def shrink(self, *going: int, to: int = 0, steps: int = 9) -> Sequence[Command]:
        self.requests += 1
        gone = tuple(Rank(rank) for rank in going)
        return self.tell(ShrinkRequested(request=str(self.requests), ranks=gone, to=to, steps=steps))

    def grow(self, to: int = 0) -> Sequence[Command]:
        self.requests += 1
        return self.tell(GrowRequested(request=str(self.requests), to=to))

    def changes(self, passed: int, layout: int = 0) -> Sequence[Command]:
        """All pause, park, resume, and who had to go has ended."""
        out = list(self.pause_all())
        out += self.park_all(passed, snapshots=[passed], layout=layout)
        gone = [command.slot for command in every(FenceWorker, out)]
        out += self.resume_all()
        for slot in gone:
            out += self.exits(slot, snapshots=[passed])
        return out


def job(how: str, *, slots: int = 4, spares: int = 0, classes: str = "all", **settings: Any) -> Sized:
    """One tray, and a mesh of its ranks where the script names one."""
    harness = Sized(JobConfig(trays_min=1, trays_max=1, spares=spares, min_ranks=1, rules=RULES))
    config = JobConfig(trays_min=1, trays_max=1, spares=spares, **({"min_ranks": 1, "rules": RULES} | settings))  # type: ignore[arg-type]
    harness.core = FollowedCore(config)
    harness.resizes = how
    harness.join("a", slots)
    harness.train(classes)
    return harness


def pairs(classes: str = "pair", **settings: Any) -> Sized:
    """dp = 3, tp = 2."""
    return job(AGAIN, slots=6, classes=classes, mesh=(("dp", 3), ("tp", 2)), **settings)


def said(commands: Sequence[Command]) -> list[str]:
    return [answer.text for answer in every(Answer, commands)]


# -- shrink ----------------------------------------------------------------------------------------------------------
@BOTH
def test_ranks_leave_at_a_step_boundary_and_no_step_is_done_again(how: str) -> None:
    harness = job(how)
    begun = harness.shrink(to=2)
    assert said(begun) == ["shrink to 2 ranks: ranks 2, 3 will leave at the next step boundary"]
    assert len(only(PauseWorkers, begun).workers) == 4
    changed = harness.changes(passed=7)
    plan = plan_in(changed)
    assert (plan.world_size, plan.committed, plan.rollback) == (2, Position(7), None)
    assert [(fenced.slot, fenced.swept_along) for fenced in every(FenceWorker, changed)] == [
        ("a/2", True),
        ("a/3", True),
    ]
    assert said(changed) == ["the world has 2 of 4 ranks, until others are asked for (rackctl grow)"]
    assert not every(Decided, changed), "nothing has failed"


@BOTH
def test_they_wait_as_spares_and_the_world_does_not_grow_back_until_it_is_asked_to(how: str) -> None:
    harness = job(how)
    harness.shrink(to=2)
    assert [start.slot for start in every(StartWorker, harness.changes(passed=7))] == ["a/2", "a/3"]
    assert not every(PauseWorkers, [*harness.ready("a/2"), *harness.ready("a/3")])
    layout = 2 if how == AGAIN else 0
    harness.exits("a/0", snapshots=[snapshot_id(Generation(layout), Step(9))])
    assert plan_in(harness.park_all(9, snapshots=[9], layout=layout)).world_size == 2, "a spare took over"
    harness.resume_all()
    harness.ready("a/0")
    assert harness.view.most == 2
    grown = harness.grow()
    assert said(grown) == ["grow to 4 ranks: at a step boundary, as workers are ready (2 wait or start)"]
    assert every(PauseWorkers, grown)
    assert said(harness.changes(passed=12, layout=layout)) == ["the world has 4 of 4 ranks"]


def test_who_is_named_goes_and_the_last_ranks_take_their_numbers() -> None:
    harness = job(IN_PLACE)
    harness.shrink(1)
    assert ranks(plan_in(harness.changes(passed=7))) == {0: "a/0", 1: "a/3", 2: "a/2"}


def test_a_whole_replica_goes_with_the_rank_that_is_named() -> None:
    harness = pairs()
    assert said(harness.shrink(3)) == ["shrink to 4 ranks: ranks 2, 3 will leave at the next step boundary"]
    changed = harness.changes(passed=7)
    assert ranks(plan_in(changed)) == {0: "a/0", 1: "a/1", 2: "a/4", 3: "a/5"}


def test_who_is_on_a_slot_to_avoid_goes_first() -> None:
    harness = job(IN_PLACE)
    harness.judges("a/1", Health.DEGRADED)
    assert said(harness.shrink(to=3)) == ["shrink to 3 ranks: rank 1 will leave at the next step boundary"]


def test_a_swap_that_a_shrink_overtakes_is_called_off() -> None:
    harness = job(IN_PLACE, slots=5, spares=1)
    asked = harness.tell(SwapRequested(request="s", rank=Rank(1), to=SlotId(""), steps=9))
    assert said(asked) == ["rank 1 will go from a/1 to a spare at the next step boundary"]
    harness.shrink(1)
    off = "swap of rank 1 is called off: the world has 3 ranks since, not 4, and numbers them anew"
    assert said(harness.changes(passed=7))[0] == off
    assert not any("rank 1" in one for one in said(harness.grow()))


def test_shards_without_a_replica_are_in_what_all_have_sealed_for_the_pause() -> None:
    harness = pairs(classes="unique")
    harness.shrink(to=2)
    of = plan_in(harness.changes(passed=7)).reshard
    assert of is not None
    assert [image.rpartition("/")[0] for image in of.images] == [f"a:2/a/{index}" for index in range(6)]


def test_without_them_it_is_called_off_and_all_go_on() -> None:
    harness = pairs(classes="unique")
    harness.shrink(to=2)
    harness.pause_all()
    out = harness.park_all(7)
    assert said(out) == ["shrink to 2 ranks is called off: no copy of some state is left in memory"]
    plan = plan_in(out)
    assert (plan.world_size, plan.committed, plan.reshard) == (6, Position(7), None)
    assert harness.view.most == 6
    assert not every(PauseWorkers, harness.resume_all())


# -- a loss in the middle --------------------------------------------------------------------------------------------
@BOTH
def test_a_loss_in_the_middle_is_recovered_first_and_the_shrink_goes_on(how: str) -> None:
    harness = job(how, slots=5, spares=1)
    harness.shrink(to=2)
    harness.pauses("a/0")
    only(BreakGeneration, harness.exits("a/3", snapshots=[4]))
    plan = plan_in(harness.park_all(snapshots=[4]))
    assert (plan.world_size, ranks(plan)[Rank(3)]) == (4, "a/4")
    assert every(PauseWorkers, harness.resume_all())
    assert plan_in(harness.changes(passed=6)).world_size == 2


@BOTH
def test_one_that_breaks_while_all_park_for_it_comes_first_too(how: str) -> None:
    harness = job(how, slots=5, spares=1)
    harness.shrink(to=2)
    harness.pause_all()
    harness.exits("a/1", snapshots=[4])
    plan = plan_in(harness.park_all(snapshots=[4]))
    assert (plan.world_size, ranks(plan)[Rank(1)]) == (4, "a/4")
    assert every(PauseWorkers, harness.resume_all())


def test_one_that_is_asked_for_in_a_recovery_is_of_the_world_as_it_was() -> None:
    """Rank 5 is lost, and its pair's place with it."""
    harness = pairs()
    harness.exits("a/5", snapshots=[4])
    assert said(harness.shrink(0)) == ["shrink to 4 ranks: ranks 0, 1 will leave at the next step boundary"]
    assert plan_in(harness.park_all(snapshots=[4])).world_size == 4
    harness.resume_all()
    assert ranks(plan_in(harness.changes(passed=7, layout=2))) == {0: "a/2", 1: "a/3"}


def test_what_losses_have_made_as_small_is_done() -> None:
    harness = job(IN_PLACE)
    harness.shrink(to=3)
    harness.exits("a/0")
    harness.park_all()
    assert said(harness.resume_all()) == ["the world has 3 of 4 ranks, until others are asked for (rackctl grow)"]


def test_a_rank_that_is_lost_before_it_could_leave_has_left() -> None:
    """If a spare has taken its place, another goes."""
    harness = job(IN_PLACE, slots=5, spares=1)
    harness.shrink(2)
    harness.exits("a/2")
    harness.park_all()
    assert only(PauseWorkers, harness.resume_all()).because == "rank 3 will leave (rackctl shrink)"


def test_a_grow_calls_a_shrink_off() -> None:
    harness = job(IN_PLACE)
    harness.shrink(to=2)
    assert said(harness.grow()) == [
        "shrink to 2 ranks is called off: up to 4 ranks are asked for now",
        "the world has 4 of 4 ranks",
    ]
    assert not every(FenceWorker, harness.pause_all())


# -- refusals --------------------------------------------------------------------------------------------------------
def refused(commands: Sequence[Command]) -> tuple[str, str, str]:
    answer = only(Answer, commands)
    assert answer.outcome == "refused"
    return answer.refusal, answer.text.partition(": ")[2], answer.remedy


def test_what_cannot_be_is_refused_and_the_message_says_what_can() -> None:
    harness = pairs()
    assert refused(harness.shrink(to=3)) == ("size", "3 ranks are not whole replicas of 2", "possible are 2, 4, 6.")
    assert refused(harness.shrink(to=7))[1] == "the world began with 6 ranks, and grows no larger"
    assert refused(harness.shrink(0, 2, 4))[1] == "0 ranks would be left, of 1 at the least (--min-ranks)"
    assert refused(harness.shrink(6)) == ("unknown", "there are ranks 0 to 5, and no rank 6", "name others of them.")
    assert refused(harness.shrink())[0] == refused(harness.shrink(1, to=2))[0] == "unknown"
    assert refused(harness.grow(to=8))[0] == refused(harness.grow(to=2))[0] == "size"
    assert harness.view.most == 6


def test_fewer_than_min_ranks_are_refused() -> None:
    harness = pairs(min_ranks=3)
    assert refused(harness.shrink(to=2)) == (
        "size",
        "2 ranks would be left, of 3 at the least (--min-ranks)",
        "possible are 4, 6.",
    )


def test_a_world_that_cannot_change_is_refused_with_the_reason() -> None:
    assert refused(job("").shrink(to=2))[:2] == ("size", "the number of ranks is fixed: it is fixed")
    assert refused(job(IN_PLACE, min_ranks=0).shrink(to=2))[1] == "the number of ranks is fixed (--min-ranks 0)"
    assert refused(job(IN_PLACE, rules=parse_rules("no-shrink")).shrink(to=2))[0] == "policy"
    harness = job(IN_PLACE)
    assert refused(harness.shrink(to=2, steps=1))[0] == "early"
    harness.shrink(to=2)
    assert refused(harness.shrink(to=1))[0] == "taken"
    harness.tell(StopRequested(because="enough", exit_code=143))
    assert refused(harness.grow())[0] == "over"


def test_while_the_world_begins_again_nobody_knows_who_comes_and_goes_together() -> None:
    harness = pairs(start_over=True)
    for rank in (0, 2, 4):
        harness.exits(f"a/{rank}")
    harness.park_all()
    assert harness.view.phase == "restarting"
    assert refused(harness.shrink(to=3))[0] == "early"
    for rank in (1, 3, 5):
        harness.exits(f"a/{rank}", signal=9)
    assert harness.view.phase == "setup"
    assert refused(harness.shrink(to=3))[0] == refused(harness.grow())[0] == "early"
    harness.train("pair")
    assert refused(harness.shrink(to=3))[0] == "size"


def test_a_plain_script_is_refused() -> None:
    harness = Sized(JobConfig(trays_min=1, trays_max=1, spares=0, min_ranks=1))
    harness.join("a", 2)
    assert refused(harness.shrink(to=1, steps=0))[0] == "plain"


# -- growing that fails ----------------------------------------------------------------------------------------------
def lost_again(told: Sized) -> list[Command]:
    """The last rank's slot has a spare again, which joins, and is lost before it has its state."""
    told.ready("a/3")
    told.pause_all()
    out = [*told.park_all(), *told.exits("a/3"), *told.park_all(), *told.resume_all()]
    assert told.view.world_size == 3
    return out


def test_a_newcomer_that_dies_each_time_is_let_in_after_a_pause_that_doubles() -> None:
    harness = job(IN_PLACE)
    harness.exits("a/3")
    harness.park_all()
    harness.resume_all()
    out = lost_again(harness)
    (notice,) = [one.text for one in every(Notice, out) if one.text.startswith("growing")]
    assert notice == "growing has failed once: a/3 joined, and was lost before 3 steps were done; not again for 10 s"
    assert not every(PauseWorkers, harness.ready("a/3"))
    harness.now += PAUSE_MS
    due = [timer for timer in every(SetTimer, out) if str(timer.timer).startswith("grow")]
    assert [timer.at_ms for timer in due] == [harness.now]
    assert every(PauseWorkers, harness.tell(TimerFired(timer=due[0].timer)))
    harness.pause_all()
    out = [*harness.park_all(), *harness.exits("a/3"), *harness.park_all(), *harness.resume_all()]
    assert "growing has failed 2 times in a row" in " ".join(one.text for one in every(Notice, out))
    harness.ready("a/3")
    harness.now += PAUSE_MS
    assert not every(PauseWorkers, harness.tell(TimerFired(timer=timer_named("grow:0"))))
    assert every(PauseWorkers, harness.grow()), "a person need not wait"


def test_one_that_has_taken_part_in_three_steps_is_in() -> None:
    harness = job(IN_PLACE)
    harness.exits("a/3")
    harness.park_all(4)
    harness.resume_all()
    harness.ready("a/3")
    harness.pause_all()
    harness.park_all(5)
    harness.resume_all()
    harness.exits("a/3")
    out = [*harness.park_all(8), *harness.resume_all()]
    assert harness.view.world_size == 3
    assert not [one for one in every(Notice, out) if one.text.startswith("growing")]
    assert every(PauseWorkers, harness.ready("a/3"))


def test_a_pause_for_nothing_is_not_repeated_at_once() -> None:
    harness = job(IN_PLACE)
    harness.exits("a/3")
    harness.park_all()
    harness.resume_all()
    harness.ready("a/3")
    assert every(BreakGeneration, harness.pause_all())
    harness.exits("a/3")
    out = [*harness.park_all(7), *harness.resume_all()]
    assert only(ResumeGeneration, out).plan.world_size == 3
    assert "growing has failed once: nobody was ready any more" in " ".join(one.text for one in every(Notice, out))
    assert not every(PauseWorkers, harness.ready("a/3"))
    harness.now += PAUSE_MS
    assert every(PauseWorkers, harness.tell(TimerFired(timer=timer_named("grow:0"))))


def test_who_pauses_can_seal_what_it_has_so_growing_never_fails_for_want_of_state() -> None:
    """No shard has a replica, and no snapshot is there."""
    harness = pairs(classes="unique")
    harness.exits("a/5", snapshots=[4])
    assert plan_in(harness.park_all(snapshots=[4])).world_size == 4
    harness.resume_all()
    harness.exits("a/4")
    harness.ready("a/4")
    harness.ready("a/5")
    harness.pause_all()
    assert plan_in(harness.park_all(7, layout=2)).world_size == 6


# -- who is left over ------------------------------------------------------------------------------------------------
def test_what_those_have_sealed_who_go_with_a_lost_rank_is_a_source() -> None:
    """dp_shard = 2, tp = 2, and no shard has a replica."""
    harness = job(AGAIN, classes="unique", mesh=(("dp_shard", 2), ("tp", 2)))
    harness.exits("a/3", snapshots=[4])
    out = harness.park_all(snapshots=[4])
    plan = plan_in(out)
    assert (plan.world_size, plan.committed.step) == (2, 4)
    assert plan.reshard is not None
    assert [image.split("/")[2] for image in plan.reshard.images] == ["0", "1", "2", "3"]
    assert only(FenceWorker, out).slot == "a/2"
