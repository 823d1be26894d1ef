"""``run.carry``: loaders of the script's own, whose states are committed with each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from rackrun.worker.data.carried_states import CarriedStates
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended, moments
from tests.worker.scripts import WIDTH, Script, adam, ddp, fully_sharded, loss_of, net

Train = Callable[..., Ended]
STEPS = 10


class Owned(IterableDataset[Any]):
    """A loader that a framework makes for one rank. It draws from a generator of its own, too."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            seed = 1000 * self.rank + self.at
            vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
            yield vector + torch.randn(WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank, "a rank has the state of its own"
        self.at = state["at"]
        self.generator.set_state(state["generator"])


def replicated(run: Run) -> nn.Module:
    return ddp(run, nn.LayerNorm(14))


def sharded(run: Run) -> nn.Module:
    return fully_sharded(net(nn.LayerNorm(14)))


def script(model_of: Callable[[Run], nn.Module] = replicated, *, steps: int = STEPS) -> Script:
    def main(run: Run) -> None:
        model = model_of(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        owned: list[Any] = [Owned(run.rank), None]

        def make_for_this_rank() -> None:
            if owned[0].rank != run.rank:
                owned[:] = Owned(run.rank), None

        def get() -> Any:
            return owned[0].state_dict()

        def put(state: Any) -> None:
            owned[0].load_state_dict(state)
            owned[1] = None

        run.on_join(make_for_this_rank)
        run.carry("loader", get, put)

        @run.step
        def step(step: Step) -> None:
            if owned[1] is None:
                owned[1] = iter(DataLoader(owned[0], batch_size=2, generator=torch.Generator()))
            for _ in range(2):
                loss_of(model, next(owned[1])).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(steps):
            step(number)

    return main


@pytest.mark.parametrize("rank", [0, *in_stories(1, 2)])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 6))])
def test_whoever_is_lost_at_whatever_moment_the_same_samples_follow(rank: int, seed: int, train: Train) -> None:
    reference = train(script())
    ended = train(script(), kill={rank: moments(reference, rank, seed)[0]})
    assert ended.plans, ended
    assert not ended.differences(reference), ended


@pytest.mark.parametrize("rank", [2, *in_stories(0)])
def test_a_rank_that_is_lost_in_the_first_step(rank: int, train: Train) -> None:
    reference = train(script())
    first = next(index for index, what in enumerate(reference.moments[rank]) if "collective" in what)
    ended = train(script(), kill={rank: first + 1}, start_over=True)
    assert not ended.differences(reference), ended


def by_position(name: str = "loader", *, reads_elsewhere: bool = False, steps: int = STEPS) -> Script:
    """A loader that is the same on each rank, and where it stands is all of its state."""

    def main(run: Run) -> None:
        model = ddp(run, nn.LayerNorm(14))
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        stands = {"at": 0}
        run.carry(name, lambda: dict(stands), stands.update)

        def following() -> torch.Tensor:
            stands["at"] += 1
            seed = 1000 * run.rank + stands["at"]
            return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))

        @run.step
        def step(step: Step) -> None:
            loss_of(model, following()).backward()
            optimizer.step()
            optimizer.zero_grad()

        if reads_elsewhere:
            run.every(2, following)
        for number in run.steps(steps):
            step(number)
            if reads_elsewhere and number % 3 == 1:
                following()

    return main


@pytest.mark.parametrize("rank", [2, *in_stories(0)])
def test_a_spare_that_has_tried_a_step_begins_where_its_loader_was_made_to(rank: int, train: Train) -> None:
    reference = train(by_position())
    first = next(index for index, what in enumerate(reference.moments[rank]) if "collective" in what)
    ended = train(by_position(), kill={rank: first + 1}, start_over=True)
    assert not ended.differences(reference), ended


def test_what_is_read_outside_of_steps_is_read_again(train: Train) -> None:
    reference = train(by_position())
    ended = train(by_position(reads_elsewhere=True), kill={1: moments(reference, 1, 1)[0]})
    assert ended.plans, ended
    assert ended.state == reference.state, ended


def test_a_job_that_goes_on_with_another_name_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    assert train(by_position(steps=5), spares=0).exit_code == 0
    ended = train(by_position("train_loader"), spares=0)
    assert ended.exit_code == 1, ended
    assert "has the states of 'loader', and the script carries 'train_loader'" in ended.because


def test_sharded_ranks_go_back_to_a_snapshot(train: Train) -> None:
    reference = train(script(sharded), snapshot_every=4, reduction="none")
    ended = train(script(sharded), kill={1: moments(reference, 1, 3)[0]}, snapshot_every=4, reduction="none")
    assert ended.plans, ended
    assert not ended.differences(reference), ended


def test_a_job_goes_on_from_a_checkpoint(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = train(script(), spares=0)
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    assert train(script(steps=5), spares=0).exit_code == 0
    ended = train(script(), spares=0)
    assert ended.exit_code == 0, ended
    assert ended.state == reference.state, ended


def test_another_number_of_ranks_is_refused_with_the_remedy(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    assert train(script(steps=5), spares=0).exit_code == 0
    ended = train(script(), ranks=2, spares=0)
    assert ended.exit_code == 1, ended
    assert "has the states of 3 loaders for 'loader', and there are 2 data-parallel ranks" in ended.because
    assert "run.stream" in ended.because


def test_a_world_that_lost_a_rank_without_a_spare_does_not_shrink(train: Train) -> None:
    ended = train(script(), kill={1: 60}, spares=0, min_ranks=1, policy="swap,shrink,stop")
    assert all("run.carry" in ready.fixed for ready in ended.ready.values()), ended
    assert all(plan.world_size == 3 for plan in ended.plans), ended


def test_what_cannot_be_carried_is_refused(train: Train) -> None:
    def main(run: Run) -> None:
        run.carry("loader", lambda: {"of": {1, 2}}, print)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 1, ended
    assert "holds a builtins.set at state['of']" in ended.because


def test_exact_reduction_is_refused(train: Train) -> None:
    ended = train(script(), ranks=1, spares=0, reduction="exact")
    assert ended.exit_code == 1, ended
    assert "run.carry does not work with reduction" in ended.because


GLOBAL = Owned(0)


def test_a_loader_that_is_a_variable_of_the_module_counts_as_kept() -> None:
    """A check of the script would else say that the step changes something that nobody keeps."""
    carried = CarriedStates(lambda: (0, 1))
    carried.add("loader", lambda: {**GLOBAL.state_dict()}, lambda state: GLOBAL.load_state_dict(dict(state)))
    assert any(one is GLOBAL for one in carried._reached)
