"""Groups over some of the ranks: a spare that was built as another rank takes a place in them, or is built anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import Samples, adam, ddp, loss_of

Train = Callable[..., Ended]
RANKS, STEPS = 5, 14


def of_some(*groups: list[int]) -> Callable[[Run], None]:
    """The ranks of each group add up something in every step, which goes into the loss; the others do not."""

    def main(run: Run) -> None:
        made = [dist.new_group(ranks) for ranks in groups]
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                scale = torch.ones(1)
                for group, ranks in zip(made, groups, strict=True):
                    if run.rank in ranks:
                        dist.all_reduce(scale, group=group)
                step.backward(loss_of(model, batch) / scale.item())
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    return main


@pytest.mark.parametrize(
    "groups",
    [
        ([0, 1, 2],),
        pytest.param(([0, 1], [1, 2, 3]), marks=pytest.mark.stories),  # they overlap
        pytest.param(([0, 1], [2, 3, 4]), marks=pytest.mark.stories),  # of two sizes
        pytest.param(([4],), marks=pytest.mark.stories),
    ],
)
def test_every_rank_is_lost_once(groups: tuple[list[int], ...], train: Train) -> None:
    main = of_some(*groups)
    how: dict[str, Any] = {"ranks": RANKS, "batch": (10, 2), "deadline_s": 120.0}
    reference = train(main, **how)
    assert reference.exit_code == 0, reference
    ended = train(main, kill={rank: f"committed Position(step={2 + 2 * rank}," for rank in range(RANKS)}, **how)
    assert not ended.differences(reference), ended
    assert len(ended.plans) >= RANKS
    assert not ended.restarted, ended
