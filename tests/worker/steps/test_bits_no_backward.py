"""The bits are the same, with and without a death, where a forward pass of DDP has no backward pass of its parameters.

torch's reducer then communicates in the next backward pass, even in a micro-batch that is not the last. The reducer of
a process that takes over has seen no such forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, WIDTH, Samples, Script, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]


def frozen_judge(run: Run, **options: Any) -> None:
    """A GAN, whose discriminator is frozen for the generator's part, and called through DDP."""
    maker, judge = DDP(net()), DDP(nn.Sequential(nn.Linear(WIDTH, 14), nn.ReLU(), nn.Linear(14, 1)), **options)
    for_maker, for_judge = adam(maker), adam(judge)
    run.track(maker=maker, judge=judge, for_maker=for_maker, for_judge=for_judge)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        seen = []
        for_judge.zero_grad()
        for batch in data:
            seen.append((batch, step.weight))
            with torch.no_grad():
                fake = maker(batch)
            step.backward(functional.softplus(-judge(batch)).mean() + functional.softplus(judge(fake)).mean())
        for_judge.step()
        for_maker.zero_grad()
        judge.requires_grad_(False)
        for batch, weight in seen:
            step.backward(functional.softplus(-judge(maker(batch))).mean(), weight=weight)
        judge.requires_grad_(True)
        for_maker.step()

    for number in run.steps(STEPS):
        step(number)


def frozen_judge_with_unused_parameters(run: Run) -> None:
    frozen_judge(run, find_unused_parameters=True)


def frozen_judge_with_bucket_views(run: Run) -> None:
    frozen_judge(run, gradient_as_bucket_view=True)


def forward_for_display(run: Run) -> None:
    """At the end of each step, without torch.no_grad()."""
    model = ddp(run)
    batch = torch.ones(2, WIDTH)
    fit(run, model, adam(model), after=lambda _: run.log(after=float(loss_of(model, batch))))


def forward_between_steps(run: Run) -> None:
    model = ddp(run)
    batch = torch.ones(2, WIDTH)

    def between(_: int) -> None:
        run.log(after=float(loss_of(model, batch)))

    fit(run, model, adam(model), between=between)


SCRIPTS: list[Script] = [
    frozen_judge,
    frozen_judge_with_unused_parameters,
    frozen_judge_with_bucket_views,
    forward_for_display,
    forward_between_steps,
]


@pytest.mark.parametrize("dies", [pytest.param("after a micro-batch", marks=pytest.mark.stories), "before the gate"])
@pytest.mark.parametrize("main", SCRIPTS, ids=lambda main: main.__name__)
def test_a_forward_without_a_backward_does_not_decide_when_the_next_step_reduces(
    main: Script, dies: str, train: Train
) -> None:
    reference = train(main, ranks=2)
    assert reference.exit_code == 0, reference
    lived = reference.moments[1]
    before, after = (_first(lived, f"committed Position(step={step},") for step in (3, 4))
    if dies == "before the gate":
        moment = _first(lived, "passed the gate of Position(step=4,") - 1
    else:
        moment = [index for index in range(before, after) if lived[index].startswith("batch ")][1]
    ended = train(main, ranks=2, kill={1: moment})
    assert not ended.differences(reference), f"{lived[moment]}\n{ended}"
    assert len(ended.plans) == 1, f"one death, and not {len(ended.plans)}\n{ended}"


@pytest.mark.parametrize("main", [forward_for_display, forward_between_steps], ids=lambda main: main.__name__)
def test_exact_sums_hold_after_a_forward_without_a_backward(main: Script, train: Train) -> None:
    reference = train(main, ranks=2, reduction="exact")
    assert reference.exit_code == 0, reference
    lived = reference.moments[1]
    moment = _first(lived, "passed the gate of Position(step=4,") - 1
    ended = train(main, ranks=2, reduction="exact", kill={1: moment})
    assert not ended.differences(reference), f"{lived[moment]}\n{ended}"
    assert len(ended.plans) == 1, f"one death, and not {len(ended.plans)}\n{ended}"


def _first(lived: list[str], begins: str) -> int:
    return next(index for index, what in enumerate(lived) if what.startswith(begins))
