"""A loop that is left early, and a rank that is lost about then: who takes over leaves the loop too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from torch import nn

from rackrun.worker.loop.run import Run
from rackrun.worker.loop.unit_runner import UnitRunner
from tests.variants import in_stories
from tests.worker.harness import Ended
from tests.worker.scripts import Script, adam, ddp, fit, fully_sharded, net

Train = Callable[..., Ended]
LAST = 6
"""The step after which all leave."""


def fsdp(run: Run) -> nn.Module:
    return fully_sharded(net())


def dies(run: Run) -> None:
    if (run.generation, run.rank) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def when_the_step_is_committed(run: Run) -> None:
    """No script has seen it return."""
    committed = UnitRunner._committed

    def then(self: UnitRunner, at: object, *more: object) -> None:
        committed(self, at, *more)  # type: ignore[arg-type]
        if self.passed.step == LAST:
            self._parts.settle()
            dies(run)

    UnitRunner._committed = then  # type: ignore[method-assign,assignment]


def script(make: Callable[[Run], nn.Module], where: str) -> Script:
    def main(run: Run) -> None:
        model = make(run)
        if where == "committed":
            when_the_step_is_committed(run)

        def between(step: int) -> bool:
            if step == LAST and where == "before the break":
                dies(run)
            return step == LAST

        def after(step: int) -> None:
            if step == LAST and where == "in the step":
                dies(run)

        fit(run, model, adam(model), steps=40, between=between, after=after)
        if where == "after the break":
            dies(run)

    return main


@pytest.mark.parametrize(
    ("make", "snapshot_every"), [(ddp, 4), pytest.param(fsdp, 1, marks=pytest.mark.stories), (fsdp, 4)]
)
@pytest.mark.parametrize("where", ["before the break", *in_stories("in the step", "committed", "after the break")])
def test_who_takes_over_leaves_the_loop_that_the_others_have_left(
    where: str, make: Callable[[Run], nn.Module], snapshot_every: int, train: Train
) -> None:
    reference = train(script(make, ""), ranks=3)
    ended = train(script(make, where), ranks=3, snapshot_every=snapshot_every)
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 1, ended
    assert max(ended.losses) == LAST


def test_a_name_that_only_the_body_of_the_loop_binds_is_explained(
    train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who takes over after the loop has not run its body."""

    def main(run: Run) -> None:
        model = ddp(run)
        bound: list[int] = []
        fit(run, model, adam(model), steps=5, between=bound.append)
        dies(run)
        if bound:
            last = bound[-1]
        print(last)

    ended = train(main, ranks=3, max_restarts=0)
    assert ended.exit_code == 1
    said = capfd.readouterr().err
    assert "UnboundLocalError" in said
    assert "Remedy: bind such names before the loop" in said
