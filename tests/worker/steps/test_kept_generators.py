"""A generator of the script's own around the loader, kept from step to step: nobody trains on with what it should not hold.

Without a check each of these scripts would end with other weights, and exit code 0.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, Samples, adam, ddp, loss_of
from tests.worker.steps.loader_generators import counted, endless

Train = Callable[..., Ended]


def counted_ahead(loader: Any) -> Iterator[Any]:
    """The iteration over the loader is over when it yields the step's last micro-batch."""
    number = 0
    while True:
        for batch in list(loader):
            number += 1
            yield batch * (1 + 0.1 * (number % 5))


def lose_rank_1(run: Run) -> None:
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run._world.wait_broken()


IN_THE_MIDDLE, AT_THE_END, BETWEEN = "in the middle", "at the end", "between"


@pytest.mark.parametrize(
    ("around", "lost", "at", "two_loaders", "tried"),
    [
        pytest.param(counted_ahead, AT_THE_END, 3, False, True, id="its iteration was over"),
        pytest.param(counted, IN_THE_MIDDLE, 3, True, True, id="a second loader was read after it"),
        pytest.param(counted, BETWEEN, 3, False, True, id="a spare has it as its trial step left it"),
        pytest.param(counted, BETWEEN, STEPS - 1, False, False, id="a spare begins it anew, for the last step"),
        pytest.param(endless, AT_THE_END, 3, True, True, id="it keeps nothing, and goes on"),
    ],
)
def test_a_kept_generator_that_would_give_other_values_ends_the_job(
    around: Callable[[Any], Iterator[Any]], lost: str, at: int, two_loaders: bool, tried: bool, train: Train
) -> None:
    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = around(data)
        others = endless(run.loader(Samples())) if two_loaders else None

        def loses(where: str, step: int) -> None:
            if fault and (where, step, run.generation) == (lost, at, 1):
                lose_rank_1(run)

        @run.step
        def step(step: Step) -> None:
            for number in range(len(data)):
                batch = next(batches)
                step.backward(loss_of(model, batch if others is None else batch + next(others)))
                if not number:
                    loses(IN_THE_MIDDLE, int(step))
            loses(AT_THE_END, int(step))
            optimizer.step()
            optimizer.zero_grad()

        if not tried:  # a spare tries the step only where there is one

            @run.step
            def another(step: Step) -> None:
                raise AssertionError("not called")

        for number in run.steps(STEPS):
            loses(BETWEEN, number)
            step(number)

    reference = train(lambda run: main(run, False), ranks=2)
    assert reference.exit_code == 0, reference
    ended = train(lambda run: main(run, True), ranks=2)
    if around is endless:
        assert ended.exit_code == 0, ended
        assert not ended.differences(reference), ended
    else:
        assert ended.exit_code == 1, ended
        assert "a generator around run.loader, kept from step to step, holds number, batch." in str(ended.failure)


def test_a_generator_around_the_whole_loop_is_none_around_the_loader(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(run: Run, fault: bool) -> None:
        for _ in losses(run, fault):
            pass

    def losses(run: Run, fault: bool) -> Iterator[float]:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> float:
            for batch in data:
                step.backward(loss_of(model, batch))
            if fault and (int(step), run.generation) == (3, 1):
                lose_rank_1(run)
            optimizer.step()
            optimizer.zero_grad()
            return step.loss

        for number in run.steps(STEPS):
            yield step(number)

    reference = train(lambda run: main(run, False), ranks=2)
    ended = train(lambda run: main(run, True), ranks=2)
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended
    assert "a generator around run.loader" not in capfd.readouterr().err
