"""What the coordinator makes of the own times that ranks tell with their commits."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from rackrun.coordinator.observe.slow_ranks import SlowMetrics, SlowWatch
from rackrun.core.stragglers.straggler_detection import Limits
from rackrun.protocol.commands import BreakGeneration, GenerationPlan, ResumeGeneration
from rackrun.protocol.events import SlowRanksChanged, WorkerReady
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.wire import UnitCommitted
from tests.coordinator.fakes import member, plan

FOUR = plan(1, *(member(rank, f"a/{rank}", rank + 1) for rank in range(4)))
ENOUGH = Limits().settle + Limits().hits


class Watched:
    def __init__(self, after_s: float | None = 10.0, world: GenerationPlan = FOUR) -> None:
        self.changed: list[SlowRanksChanged] = []
        self.registry = CollectorRegistry()
        metrics = SlowMetrics()
        self.registry.register(metrics)
        self.watch = SlowWatch(after_s, self.changed.append, metrics)
        self.step = 0
        self.resume(world)

    def resume(self, world: GenerationPlan) -> None:
        self.world = world
        self.watch.on_command(ResumeGeneration(plan=world, because="test"))

    def steps(self, count: int, *own: float, passes: tuple[int, ...] = (), generation: int = 0) -> None:
        for _ in range(count):
            for rank, seconds in enumerate(own):
                self.watch.committed(self.unit(rank, seconds, passes[rank] if passes else 2, generation))
            self.step += 1

    def unit(
        self, rank: int, own: float, passes: int = 2, generation: int = 0, in_passes: float = 0.0, meets: bool = False
    ) -> UnitCommitted:
        return UnitCommitted(
            slot=SlotId(f"a/{rank}"),
            incarnation=Incarnation(rank + 1),
            generation=Generation(generation or self.world.generation),
            rank=Rank(rank),
            at=Position(self.step),
            seconds=1.0,
            own=own,
            passes=passes,
            in_passes=in_passes,
            meets=meets,
        )

    @property
    def slow(self) -> list[list[int]]:
        return [[one.rank for one in event.slow] for event in self.changed]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_slow_rank_is_told_once_with_its_slot_and_generation(watched: Watched) -> None:
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.9, 0.5)
    (event,) = watched.changed
    (one,) = event.slow
    assert (event.generation, one.rank, one.slot, one.times) == (1, 2, "a/2", 1.8)


def test_nobody_looks_when_told_not_to() -> None:
    watched = Watched(None)
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.9, 0.5)
    assert not watched.changed


def test_a_step_that_some_have_not_told_of_yet_is_not_judged(watched: Watched) -> None:
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.9)
    assert not watched.changed


def test_commits_of_several_steps_may_come_in_any_order(watched: Watched) -> None:
    for rank, seconds in enumerate((0.5, 0.5, 0.9, 0.5)):
        watched.step = 0
        for _ in range(ENOUGH):
            watched.watch.committed(watched.unit(rank, seconds))
            watched.step += 1
    assert watched.slow == [[2]]


def test_a_step_of_which_one_own_time_is_not_known_is_left_out(watched: Watched) -> None:
    """It was disturbed, or its device is a GPU."""
    watched.steps(2 * ENOUGH, 0.5, 0.0, 0.9, 0.5)
    assert not watched.changed


def test_a_rank_with_more_micro_batches_is_not_slow_for_that(watched: Watched) -> None:
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.75, 0.5, passes=(2, 2, 3, 2))
    assert not watched.changed
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.75, 0.75, passes=(2, 2, 3, 2))
    assert watched.slow == [[3]]


def test_what_a_step_costs_beside_its_micro_batches_is_not_taken_for_slowness(watched: Watched) -> None:
    """A rank that was slow has one micro-batch, and is as fast as the others now: half of its time is the update."""
    for _ in range(2 * ENOUGH):
        for rank, passes in enumerate((3, 3, 1, 3)):
            watched.watch.committed(watched.unit(rank, 0.2 + 0.2 * passes, passes, in_passes=0.2 * passes))
        watched.step += 1
    assert not watched.changed


def test_with_a_slow_rank_goes_what_the_rest_of_a_step_costs_and_whether_ranks_meet(watched: Watched) -> None:
    for step in range(ENOUGH):
        for rank, slow in enumerate((1, 1, 2, 1)):
            unit = watched.unit(rank, 0.5 * slow, 4, in_passes=0.4 * slow, meets=step == 0 and rank == 3)
            watched.watch.committed(unit)
        watched.step += 1
    (event,) = watched.changed
    assert (event.rest, event.meets) == (1.0, True)


def test_stages_of_a_pipeline_are_not_compared_with_each_other(watched: Watched) -> None:
    """pp is the slower axis: ranks 0 and 1 are one stage."""
    axes = (("pp", 2), ("dp", 2))
    watched.watch.on_event(WorkerReady(slot=SlotId("a/0"), incarnation=Incarnation(1), mesh=axes))
    watched.steps(2 * ENOUGH, 0.3, 0.3, 0.9, 0.9)
    assert not watched.changed
    watched.steps(2 * ENOUGH, 0.3, 0.6, 0.9, 0.9)
    assert watched.slow == [[1]]


def test_nor_are_they_after_the_world_has_got_smaller(watched: Watched) -> None:
    axes = (("pp", 2), ("dp", 3))
    watched.watch.on_event(WorkerReady(slot=SlotId("a/0"), incarnation=Incarnation(1), mesh=axes))
    watched.resume(plan(2, *FOUR.members))
    watched.steps(2 * ENOUGH, 0.3, 0.3, 0.9, 0.9)
    assert not watched.changed


def test_between_two_generations_nothing_is_judged(watched: Watched) -> None:
    watched.steps(ENOUGH - 1, 0.5, 0.5, 0.9, 0.5)
    watched.watch.on_command(BreakGeneration(generation=Generation(2), workers=(), because="test"))
    watched.steps(ENOUGH, 0.5, 0.5, 0.9, 0.5)
    assert not watched.changed


def test_who_took_over_is_not_slow_for_what_the_one_before_was(watched: Watched) -> None:
    watched.steps(ENOUGH, 0.5, 0.5, 0.9, 0.5)
    new = member(2, "b/0", 9)
    watched.resume(plan(2, *FOUR.members[:2], new, FOUR.members[3]))
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.5, 0.5)
    assert watched.slow == [[2], []]


def test_commits_of_an_older_generation_do_not_count(watched: Watched) -> None:
    watched.resume(msgspec.structs.replace(FOUR, generation=Generation(2)))
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.9, 0.5, generation=1)
    assert not watched.changed


def test_the_metrics_have_every_ranks_own_time_and_how_many_are_slow(watched: Watched) -> None:
    watched.steps(2 * ENOUGH, 0.5, 0.5, 0.9, 0.5)
    assert watched.registry.get_sample_value("rackrun_slow_ranks") == 1
    assert watched.registry.get_sample_value("rackrun_own_seconds", {"rank": "2"}) == 0.9
    assert watched.registry.get_sample_value("rackrun_own_seconds", {"rank": "0"}) == 0.5
