"""A loss that is not finite is computed once more: what comes again is the script's, what does not is the GPU's."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, TinyCluster, say
from tests.worker.scripts import Samples, Script, adam, ddp, loss_of

Train = Callable[..., Ended]
Spoils = Callable[[Run, Step], float]
"""What is added to the loss: nothing that gradients come of."""

STEPS = 8


def script(spoils: Spoils, before: Callable[[Run, int], None] = lambda run, step: None) -> Script:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        attempts: dict[int, int] = {}

        @run.step
        def train_step(step: Step) -> None:
            attempts[int(step)] = attempts.get(int(step), 0) + 1
            for batch in data:
                loss = loss_of(model, batch)
                step.backward(loss + spoils(run, step))
            optimizer.step()
            optimizer.zero_grad()

        for step in run.steps(STEPS):
            before(run, step)
            train_step(step)
        say(attempts=[attempts.get(step, 0) for step in range(STEPS)])

    return main


def once(*steps: int, rank: int = 1, value: float = math.nan) -> Spoils:
    """At the first attempt, on this rank in its first place."""
    return lambda run, step: (
        value if (run.rank, step.attempt) == (rank, 0) and int(step) in steps and run.generation == 1 else 0.0
    )


def undisturbed(**how: Any) -> Ended:
    ended = TinyCluster(script(lambda run, step: 0.0), spares=0, **how).run()
    assert ended.exit_code == 0, ended
    return ended


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKRUN_NAN_PROBATION", "1")


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        ("fast", math.nan),
        ("exact", math.inf),
        *(pytest.param(*one, marks=pytest.mark.stories) for one in (("fast", math.inf), ("exact", math.nan))),
    ],
)
def test_what_does_not_come_again_has_cost_a_step_and_is_noted(reduction: str, value: float, train: Train) -> None:
    ended = train(script(once(5, value=value)), reduction=reduction)
    assert not ended.differences(undisturbed(reduction=reduction)), ended
    assert not ended.plans, ended
    assert all(said["attempts"][5] == 2 for said in ended.said.values()), ended.said
    assert "rank 1 on " in str(ended)
    assert "its loss in step 5 was not finite, and was when computed once more" in str(ended)


def test_the_second_time_its_rank_leaves_the_slot_between_two_steps(train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "a spare is ready"

    def wait(run: Run, step: int) -> None:
        while run.generation == 1 and not (mark.exists() if step < 5 else run._world.pausing):
            time.sleep(0.005)

    ended = train(script(once(3, 4), wait), mark=mark)
    assert not ended.differences(undisturbed()), ended
    (plan,) = ended.plans
    assert [member.rank for member in plan.members if member.fresh] == [1]
    assert "a planned swap, at the next step boundary: rank 1: its loss was not finite" in str(ended)


def test_what_comes_again_is_the_scripts_and_goes_on(train: Train, capfd: Any) -> None:
    ended = train(script(lambda run, step: math.inf if int(step) in (3, 4, 5) and run.rank == 1 else 0.0))
    assert ended.exit_code == 0, ended
    assert not ended.plans
    assert [said["attempts"] for said in ended.said.values()] == [[1, 1, 1, 2, 1, 1, 1, 1]] * 3, "twice, once"
    assert capfd.readouterr().err.count("it is the script's") == 1
    assert "was when computed once more" not in str(ended)
    assert [at.step for at, gate in ended.gates.items() if math.isinf(gate[0])] == [3, 4, 5]


def test_phases_in_between_do_not_have_every_step_done_twice(train: Train) -> None:
    def main(run: Run) -> None:
        run.every(1, lambda: None)
        script(lambda run, step: math.inf if int(step) in (3, 4, 5) and run.rank == 1 else 0.0)(run)

    ended = train(main)
    assert ended.exit_code == 0, ended
    assert [said["attempts"] for said in ended.said.values()] == [[1, 1, 1, 2, 1, 1, 1, 1]] * 3


def test_where_more_than_one_rank_has_it_nobody_is_noted(train: Train) -> None:
    ended = train(script(lambda run, step: math.nan if int(step) == 3 and not step.attempt and run.rank else 0.0))
    assert not ended.differences(undisturbed()), ended
    assert "was when computed once more" not in str(ended)


def test_a_rank_that_dies_in_the_second_attempt_changes_nothing(train: Train) -> None:
    """Others have seen the first one, and its successor has not."""

    def spoils(run: Run, step: Step) -> float:
        if int(step) == 5 and run.generation == 1 and step.attempt and run.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return math.nan if int(step) == 5 and run.generation == 1 and run.rank == 1 else 0.0

    ended = train(script(spoils))
    assert not ended.differences(undisturbed()), ended
    assert len(ended.plans) == 1, ended


def test_unless_it_is_asked_for_nothing_is_done_twice(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACKRUN_NAN_PROBATION")
    ended = train(script(once(3, value=math.inf)))
    assert ended.exit_code == 0, ended
    assert all(said["attempts"] == [1] * STEPS for said in ended.said.values())


def test_a_phase_has_no_loss(train: Train) -> None:
    def main(run: Run) -> None:
        run.every(2, lambda: torch.distributed.all_reduce(torch.full((1,), math.nan)))
        script(lambda run, step: 0.0)(run)

    assert train(main).exit_code == 0
