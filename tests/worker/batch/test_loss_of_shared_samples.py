"""Ranks that share their samples have the same loss, which counts once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rackrun.worker.batch.mesh_axes import ranks_of_one_loss
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, say


@pytest.mark.parametrize("mesh", [None, {"dp": -1, "tp": 2}, {"tp": 2, "cp": -1}])
def test_the_loss_of_a_step_is_the_mean_over_the_global_batch(
    mesh: dict[str, int] | None, train: Callable[..., Ended]
) -> None:
    def main(run: Run) -> None:
        model = nn.Linear(2, 1)
        run.track(model=model)
        data = run.loader([torch.full((2,), float(index)) for index in range(8)], shuffle=False)

        @run.step
        def train_step(step: Step) -> float:
            for batch in data:
                step.scale(batch.mean())
            return step.loss

        say(losses=[train_step(number) for number in run.steps(2)])

    ended = train(main, ranks=2, spares=0, batch=(4, 2), mesh=mesh)
    assert ended.exit_code == 0, ended
    assert [ended.said[rank]["losses"] for rank in range(2)] == [[1.5, 5.5]] * 2


def test_stages_of_a_pipeline_do_not_share_a_loss() -> None:
    assert ranks_of_one_loss(()) == 1
    assert ranks_of_one_loss((("dp", 4),)) == 1
    assert ranks_of_one_loss((("dp", 4), ("pp", 2), ("tp", 3))) == 3
