"""Loops whose body calls phases, and loops that are no `for step in run.steps(n)`: a rank that is taken over goes on
in the same turn, at the same call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.protocol.ids import EVERY, NEXT_TURN, Position, unit_text
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, loss_of
from tests.worker.steps.test_redone_steps import places, spread

Train = Callable[..., Ended]
WAITS = "TEST_WAITS_FOR_DRAIN"
"""Variable with which no rank does step ``STEPS - 2`` before it knows that the job is to end."""


class Record:
    """What phases have found; a tracked object."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"found": list(self.found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = list(state["found"])


def prepared(run: Run) -> tuple[Callable[[Step], float], Callable[[float], float], Record]:
    """The step function, a phase that all ranks add something to and that changes the model, and what it records."""
    model = ddp(run)
    optimizer, record = adam(model), Record()
    run.track(model=model, optimizer=optimizer, record=record)
    data = run.loader(Samples())

    def train(step: Step) -> float:
        while WAITS in os.environ and int(step) == STEPS - 2 and not run._world.drain:
            time.sleep(0.001)
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        return step.loss

    def evaluate(plus: float) -> float:
        total = torch.tensor([run.rank + plus + float(torch.rand(()))])
        dist.all_reduce(total)
        record.found.append(float(total))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)
        return float(total)

    return train, evaluate, record


def phases_in_the_body(run: Run) -> None:
    train, evaluate, record = prepared(run)
    step = run.step(train)
    run.every(2, lambda: evaluate(1.0))
    heard: dict[int, Any] = {}
    for number in run.steps(STEPS, phases=True):
        before = run.phase(lambda: evaluate(2.0), name="before") if number % 3 == 2 else 0
        loss = step(number)
        drawn = float(torch.rand(()))
        found = [run.phase(partial(evaluate, at), name="after") for at in (0.0, 1.0)] if number % 2 else []
        heard[number] = [before, loss, drawn, *found, float(torch.rand(()))]
    say(found=record.found, heard=heard, after=run.phase(lambda: evaluate(3.0)))


def steps_of_two_kinds(run: Run) -> None:
    train, evaluate, record = prepared(run)
    heard: dict[int, Any] = {}
    run.every(2, lambda: evaluate(1.0))

    def first(step: Step, scale: float) -> float:
        return train(step) * scale

    while run.goes_on(lambda: len(record.found) < 3 * STEPS):
        run.phase(lambda: evaluate(2.0), name="collect")
        for _ in range(2):
            heard[len(heard)] = [run.do(first, 2.0), float(torch.rand(()))]
        heard[len(heard)] = [run.do(train), run.phase(lambda: evaluate(4.0), name="evaluate")]
    say(found=record.found, heard=heard)


UNITS = {
    phases_in_the_body: [
        Position(5),
        Position(5, 1),
        Position(5, 2),
        Position(5, EVERY + 1),
        Position(4, NEXT_TURN + 1),
        Position(STEPS - 1, 2),
    ],
    steps_of_two_kinds: [Position(3), Position(4), Position(5), Position(5, 1), Position(5, 2), Position(5, EVERY + 1)],
}
CASES = [(main, at) for main, units in UNITS.items() for at in units]
QUICK = {(phases_in_the_body, Position(5, 1))}


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a rank has heard what it has heard without a fault. What it has not heard itself may be None."""
    if mine["found"] != theirs["found"] or mine.get("after") != theirs.get("after"):
        return False
    for number, heard in mine["heard"].items():
        known = [(one, other) for one, other in zip(heard, theirs["heard"][number], strict=True) if one is not None]
        if any(one != other for one, other in known):
            return False
    return True


@pytest.mark.parametrize(
    ("main", "at"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.stories) for case in CASES],
    ids=lambda one: one.__name__ if callable(one) else f"{one.step}-{one.phase}",
)
def test_a_rank_that_is_lost_in_a_turn_is_taken_over_in_that_turn(main: Script, at: Position, train: Train) -> None:
    reference = train(main, ranks=2)
    assert reference.exit_code == 0, reference
    for rank in (0, 1):
        for moment in spread(places(reference, rank, at.step, at.phase), 4):
            ended = train(main, ranks=2, kill={rank: moment}, start_over=True)
            what = f"{reference.moments[rank][moment]}\n{ended}"
            assert not ended.differences(reference), f"{ended.differences(reference)}\n{what}"
            assert all(same(ended.said[one], reference.said[one]) for one in (0, 1)), f"{ended.said}\n{what}"
            assert not ended.restarted, what
            assert ended.plans, what


@pytest.mark.parametrize("main", [phases_in_the_body, *in_stories(steps_of_two_kinds)])
def test_a_job_that_goes_back_to_a_snapshot_repeats_the_phases_of_its_turns(main: Script, train: Train) -> None:
    from tests.worker.scripts import fully_sharded, net

    def sharded(run: Run) -> None:
        globals_of = prepared.__globals__
        former = globals_of["ddp"]
        globals_of["ddp"] = lambda _: fully_sharded(net())
        try:
            main(run)
        finally:
            globals_of["ddp"] = former

    reference = train(sharded, ranks=2, snapshot_every=3)
    assert reference.exit_code == 0, reference
    for moment in spread(places(reference, 1, 5, 1), 3):
        ended = train(sharded, ranks=2, kill={1: moment}, snapshot_every=3, start_over=True)
        assert not ended.differences(reference), f"{ended.differences(reference)}\n{ended}"
        assert all(same(ended.said[one], reference.said[one]) for one in (0, 1)), ended.said
        assert ended.rolled_back, ended


def test_a_rank_that_is_lost_in_a_phase_before_the_first_step_is_taken_over(train: Train, tmp_path: Path) -> None:
    def main(run: Run) -> None:
        train_step, evaluate, record = prepared(run)

        def first() -> float:
            found = evaluate(1.0)
            if run.rank == 1 and mark.parent.exists() and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        for _ in range(3):
            found = run.phase(first)
            loss = run.do(train_step)
        say(found=record.found, heard={0: [found, loss]})

    mark = tmp_path / "none" / "mark"
    reference = train(main, ranks=2)
    mark = tmp_path / "mark"
    ended = train(main, ranks=2)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{ended}"
    assert ended.said == reference.said
    assert len(ended.plans) == 1, ended


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_lost_in_a_phase_after_the_last_step_of_a_loop_without_numbers(
    rank: int, train: Train, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        train_step, evaluate, record = prepared(run)

        def last() -> None:
            evaluate(4.0)
            if run.rank == rank and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        run.every(3, last)
        run.at_end(lambda: evaluate(5.0))
        for _ in range(3):
            run.do(train_step)
        run.at_end(lambda: say(found=record.found))

    ended = train(main, ranks=2)
    reference = train(main, ranks=2)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{ended}"
    assert ended.said == reference.said
    assert len(ended.plans) == 1, ended


def test_a_loop_that_is_left_after_a_phase_is_left_by_who_takes_over(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def main(run: Run) -> None:
        train_step, evaluate, record = prepared(run)
        step = run.step(train_step)
        run.at_end(lambda: evaluate(5.0))
        for number in run.steps(STEPS, phases=True):
            step(number)
            run.phase(lambda: evaluate(1.0), name="evaluate")
            if number == 4:
                if run.rank == 1 and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                break
        say(found=record.found)

    ended = train(main, ranks=2)
    reference = train(main, ranks=2)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{ended}"
    assert ended.said == reference.said
    assert len(ended.plans) == 1, ended


@pytest.mark.parametrize("main", [phases_in_the_body, steps_of_two_kinds])
def test_a_job_that_was_drained_goes_on_in_the_turn_in_which_it_ended(
    main: Script, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = train(main, ranks=2)
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    with monkeypatch.context() as first_job:
        first_job.setenv(WAITS, "1")
        first = train(main, ranks=2, drain_at=4)
    assert first.exit_code == 0, first
    assert max(first.losses) < max(reference.losses)
    second = train(main, ranks=2)
    assert second.exit_code == 0, second
    assert min(second.losses) == max(first.losses) + 1, "each step once"
    assert {**first.losses, **second.losses} == reference.losses
    assert second.state == reference.state
    assert all(same(second.said[rank], reference.said[rank]) for rank in (0, 1)), (second.said, reference.said)


def test_a_loop_without_a_number_of_steps_ends_where_its_body_decides(train: Train) -> None:
    def main(run: Run) -> None:
        train_step, evaluate, record = prepared(run)
        run.every(3, lambda: evaluate(4.0))
        run.at_end(lambda: evaluate(5.0))
        for _ in range(3):
            run.do(train_step)
        say(found=record.found)

    ended = train(main, ranks=2)
    assert ended.exit_code == 0, ended
    assert sorted(ended.losses) == [0, 1, 2]
    assert Position(2, EVERY + 1) in ended.gates, "the phase that is due after the last step"
    assert max(ended.gates) == Position(3, 1), "the phase at the end"


def test_who_ends_its_loop_by_an_object_of_a_later_turn_is_told_what_to_write(train: Train) -> None:
    def main(run: Run) -> None:
        train_step, evaluate, record = prepared(run)
        while len(record.found) < 4:  # the first phase of a turn decides that it is the last
            run.phase(lambda: evaluate(1.0))
            for _ in range(2):
                run.do(train_step)
        say(found=record.found)

    reference = train(main, ranks=2)
    ended = train(main, ranks=2, kill={1: places(reference, 1, 7)[0]}, max_restarts=0)
    assert ended.failure is not None, ended
    assert "while run.goes_on(lambda: ...)" in ended.failure.traceback


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("phase in a step", "was called in a step or a phase"),
        ("phase in a plain loop", "write run.steps(n, phases=True)"),
        ("do in a loop", "has a loop over run.steps()"),
        ("do in a phase", "was called in a step or a phase"),
        ("steps after do", "after run.do or run.phase"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(wrong: str, said: str, train: Train) -> None:
    def main(run: Run) -> None:
        train_step, evaluate, _ = prepared(run)

        def with_a_phase(step: Step) -> float:
            run.phase(lambda: evaluate(1.0))
            return train_step(step)

        step = run.step(with_a_phase if wrong == "phase in a step" else train_step)
        if wrong == "steps after do":
            run.do(train_step)
        if wrong == "do in a phase":
            run.phase(lambda: run.do(train_step))
        for number in run.steps(2):
            if wrong == "do in a loop":
                run.do(train_step)
            step(number)
            if wrong == "phase in a plain loop":
                run.phase(lambda: evaluate(1.0))

    ended = train(main, ranks=1, spares=0)
    assert ended.failure is not None, ended
    assert said in ended.failure.traceback, ended


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (Position(4), "step 4"),
        (Position(4, 2), "step 4 phase 2"),
        (Position(4, EVERY + 1), "step 4 every 1"),
        (Position(4, NEXT_TURN + 1), "before step 5 phase 1"),
    ],
)
def test_a_unit_s_name_says_where_in_the_loop_it_is(at: Position, text: str) -> None:
    assert unit_text(at) == text


def test_a_result_that_nobody_else_could_be_given_is_said_once(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    def main(run: Run) -> None:
        train_step, evaluate, _ = prepared(run)
        for _ in range(3):
            run.do(train_step)
            run.phase(lambda: torch.tensor(evaluate(1.0)), name="measure")

    assert train(main, ranks=2).exit_code == 0
    said = capfd.readouterr()
    assert (said.out + said.err).count("measure returns a Tensor") == 1
