"""What ``main`` builds may fit one rank alone, as process groups and shards of a framework that no group of torch shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, say
from tests.worker.scripts import Samples, adam, ddp, loss_of

Train = Callable[..., Ended]
STEPS = 10


def built_for_its_rank(run: Run) -> None:
    """A step fails where this process is another rank than the one that ``main`` was entered as."""
    built = dist.get_rank()
    run._bind_to_rank("something was built for this rank")
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def train_step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        if step._world.generation and dist.get_rank() != built:  # no trial run of a spare
            raise AssertionError(f"built as rank {built}, and now rank {dist.get_rank()}")
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        train_step(number)
    say(built=built)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_spare_that_takes_another_rank_over_enters_main_again(victim: int, train: Train) -> None:
    reference = train(built_for_its_rank, ranks=3, spares=0)
    ended = train(built_for_its_rank, ranks=3, spares=1, kill={victim: "committed Position(step=4,"})
    assert ended.exit_code == 0, ended
    assert not ended.restarted, ended
    assert not ended.differences(reference), ended
    assert [ended.said[rank]["built"] for rank in range(3)] == [0, 1, 2]


def test_its_number_of_ranks_stays(train: Train) -> None:
    ended = train(built_for_its_rank, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert ended.ready
    for ready in ended.ready.values():
        assert ready.fixed == "something was built for this rank"
        assert not ready.reenters
