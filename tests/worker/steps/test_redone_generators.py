"""A generator or iterator that a script keeps around the loader goes on where a step is done again, or the job ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, Samples, adam, ddp, loss_of
from tests.worker.steps.loader_generators import counted, endless

Train = Callable[..., Ended]


@pytest.mark.parametrize("read", [1, 3], ids=["between two micro-batches", "after the last one"])
def test_an_endless_generator_around_the_loader_goes_on_where_a_step_is_done_again(
    read: int, train: Train, tmp_path: Path
) -> None:
    """The script keeps it from step to step. An error that left the step through it would be its end."""

    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = endless(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if fault and (int(step), number + 1) == (3, read):
                    lose_rank_1(run, step)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    def lose_rank_1(run: Run, step: Step) -> None:
        if run.rank == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif run.rank == 0 and run.generation == 1:
            run._world.wait_broken()

    reference = train(lambda run: main(run, False), ranks=2)
    ended = train(lambda run: main(run, True), ranks=2)
    assert (tmp_path / "died").exists()
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


def ahead(loader: Any) -> Iterator[Any]:
    """One micro-batch ahead of the step."""
    while True:
        batches = iter(loader)
        ready = next(batches)
        for batch in batches:
            yield ready
            ready = batch
        yield ready


@pytest.mark.parametrize(("around", "read"), [(counted, 1), (counted, 3), (ahead, 1)])
def test_a_generator_that_keeps_values_from_step_to_step_is_named_and_ends_a_job_that_would_train_otherwise(
    around: Callable[[Any], Iterator[Any]], read: int, train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 dies when rank 0 has read as far: a rank 0 that was not in the step yet would leave nothing in its
    generator."""
    os.mkfifo(tmp_path / "rank 0 has read")

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = around(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if (int(step), number + 1, run.generation) == (3, read, 1):
                    with (tmp_path / "rank 0 has read").open(
                        "rb" if run.rank == 1 else "wb"
                    ):  # both wait for the other
                        pass
                    if run.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    run._world.wait_broken()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 1, ended
    assert "StepError" in str(ended), ended
    kept = "number" if around is counted else "ready"
    assert re.search(
        f"a generator around run.loader, kept from step to step, holds [^.]*{kept}", capfd.readouterr().err
    )


def test_an_iterator_that_is_kept_from_an_attempt_that_does_not_count_is_no_step_without_data(train: Train) -> None:
    """Nobody is lost: the generation breaks, and the step is done again."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data, kept = run.loader(Samples()), list[Iterator[Any]]()

        @run.step
        def step(step: Step) -> None:
            if not kept:
                kept.append(iter(data))
            for number, batch in enumerate(kept[0]):
                step.backward(loss_of(model, batch))
                if (int(step), number, run.generation) == (3, 0, 1):
                    if run.rank == 1:
                        run._world.collective_failed(run._world.generation, RuntimeError("a link broke"))
                    run._world.wait_broken()
            kept.clear()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 1, ended
    assert "begins no iteration over run.loader" in str(ended), ended


def test_a_generator_that_a_failed_trial_step_has_left_goes_on_when_the_spare_takes_a_rank(
    train: Train, tmp_path: Path
) -> None:
    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = endless(data)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                step.backward(loss_of(model, next(batches)))
                if run.generation == 0:
                    raise ValueError("what a trial step computes is of no use")
                if fault and (int(step), number, run.generation) == (3, 2, 1):
                    if run.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    run._world.wait_broken()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference = train(lambda run: main(run, False), ranks=2)
    ended = train(lambda run: main(run, True), ranks=2)
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended
