"""One line a step, in order, whoever tells it first."""

from __future__ import annotations

import pytest

from rackrun.coordinator.observe.step_log import StepLog
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Generation, Step
from tests.coordinator.fakes import logged


class Printed(StepLog):
    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(lambda text, _: self.lines.append(text))


@pytest.fixture
def log() -> Printed:
    return Printed()


def steps(log: Printed) -> list[str]:
    return [line.split("  ")[0] for line in log.lines]


def test_what_every_rank_says_is_printed_once(log: Printed) -> None:
    for step in range(3):
        for rank in (2, 0, 1):
            log.print_first([logged(step, rank)])
    assert log.lines == ["step 0  loss 1.0000", "step 1  loss 0.5000", "step 2  loss 0.3333"]


def test_of_several_that_arrive_together_the_lowest_rank_speaks(log: Printed) -> None:
    log.print_first([logged(0, 3, loss=3.0), logged(0, 1, loss=1.0), logged(1, 3, loss=13.0), logged(1, 1, loss=11.0)])
    assert log.lines == ["step 0  loss 1.0000", "step 1  loss 11.0000"]


def test_a_gap_is_not_waited_for_and_what_comes_late_is_dropped(log: Printed) -> None:
    log.print_first([logged(0, 0)])
    log.print_first([logged(2, 1)])
    log.print_first([logged(1, 0)])
    log.print_first([logged(3, 0)])
    assert steps(log) == ["step 0", "step 2", "step 3"]


def test_steps_computed_again_after_a_rollback_are_printed_once(log: Printed) -> None:
    for step in (0, 1, 2, 3):
        log.print_first([logged(step, 0)])
    for step in (1, 2, 3, 4):
        log.print_first([logged(step, 0, incarnation=9)])
    assert steps(log) == [f"step {step}" for step in range(5)]


def test_what_was_wrong_is_told_again_and_what_was_on_its_way_is_dropped(log: Printed) -> None:
    for step in (0, 1, 2, 3):
        log.print_first([logged(step, 0)])
    log.allow_again(
        GenerationPlan(
            generation=Generation(2),
            world_size=1,
            members=(),
            store="",
            layout=Generation(0),
            full=1,
            rollback=Step(1),
            anew=True,
        )
    )
    log.print_first([logged(3, 0), logged(4, 0)])
    for step in (2, 3, 4):
        log.print_first([logged(step, 0, generation=2)])
    assert steps(log) == [f"step {step}" for step in (0, 1, 2, 3, 2, 3, 4)]


def test_the_newest_step_is_printed_once_when_the_same_worker_computes_it_again(log: Printed) -> None:
    log.print_first([logged(3, 0)])
    log.print_first([logged(3, 0, generation=2)])
    assert steps(log) == ["step 3"]


def test_two_calls_in_one_step_are_two_lines(log: Printed) -> None:
    for rank in (0, 1):
        log.print_first([logged(0, rank, loss=1.0)])
        log.print_first([logged(0, rank, lr=0.1)])
        log.print_first([logged(0, rank, lr=0.2)])
    assert log.lines == ["step 0  loss 1.0000", "step 0  lr 0.1000", "step 0  lr 0.2000"]


def test_values_are_short_and_texts_are_whole(log: Printed) -> None:
    log.print_first([logged(7, 0, loss=1.23456789e-7, epoch=3, note="warm up", big=1e9)])
    assert log.lines == ["step 7  loss 1.235e-07  epoch 3  note warm up  big 1e+09"]
