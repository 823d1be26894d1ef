"""A world without spares loses ranks and goes on without them, in place, and takes them back when they can join: DDP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from rackrun.protocol.ids import Position
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, moments, say
from tests.worker.scripts import STEPS, Samples, adam, ddp, loss_of

Train = Callable[..., Ended]
RANKS, BATCH, LONG = 4, (24, 2), 60
SHRINK = {"min_ranks": 1, "policy": "swap,shrink,wait", "ranks": RANKS, "spares": 0, "batch": BATCH}


def script(steps: int = STEPS, before: Callable[[Run, int], None] = lambda run, step: None) -> Callable[[Run], None]:
    """With clipping, and a scheduler. ``before`` is called before each step."""

    def main(run: Run) -> None:
        model = ddp(run, nn.LayerNorm(14))
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

        for number in run.steps(steps):
            before(run, number)
            step(number)

    return main


def sizes(ended: Ended) -> list[int]:
    """Of the world, after each change."""
    return [size for size, _ in itertools.groupby(plan.world_size for plan in ended.plans)]


def agreed(ended: Ended) -> dict[Position, tuple[float, ...]]:
    """In every gate: the loss over the global batch, how many samples were delivered, and a digest of which."""
    assert ended.exit_code == 0, ended
    return {at: gate[:3] for at, gate in ended.gates.items()}


def weights(ended: Ended) -> list[dict[str, str]]:
    """Of every rank: the same on all, apart from what counts ranks."""
    return [{path: bits for path, bits in held.items() if "rackrun." not in path} for held in ended.state.values()]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 6))])
def test_without_lost_ranks_the_others_compute_the_same_bits(seed: int, train: Train) -> None:
    reference = train(script(), ranks=RANKS, spares=0, batch=BATCH, reduction="exact")
    kill = {rank: moments(reference, rank, seed)[0] for rank in ((0, 2) if seed % 2 else (1, 2, 3))}
    ended = train(script(), kill=kill, reduction="exact", **SHRINK)
    assert agreed(ended) == agreed(reference), ended
    assert min(sizes(ended)) < RANKS, ended
    assert all(held in weights(reference) for held in weights(ended)), ended
    assert not ended.restarted, ended


def test_a_world_that_shrinks_is_no_reason_to_wait_longer_for_a_hung_rank(train: Train) -> None:
    """Nobody takes the lost rank's place, and yet somebody was lost: it was no hang that turned out to be slowness."""

    def tell(run: Run, step: int) -> None:
        if step == STEPS - 1:
            say(patience=run._units._pace._patience)

    reference = train(script(before=tell), ranks=RANKS, spares=0, batch=BATCH)
    ended = train(script(before=tell), kill={2: moments(reference, 2, 1)[0]}, **SHRINK)
    assert min(sizes(ended)) < RANKS, ended
    told = [fact["patience"] for fact in ended.said.values() if fact]  # who came back for the end did not see that step
    assert len(told) >= RANKS - 1, ended
    assert {*told} == {1.0}, ended


@pytest.mark.stories
def test_a_rank_that_comes_back_joins_at_a_step_boundary(train: Train, tmp_path: Path) -> None:
    """Nobody waits for it, and no step is done again for it."""
    mark = tmp_path / "ready"

    def wait_for_it(run: Run, step: int) -> None:
        while step == STEPS and run.world_size < RANKS and not mark.exists():
            time.sleep(0.01)

    reference = train(script(LONG), ranks=RANKS, spares=0, batch=BATCH, reduction="exact")
    kill = {2: moments(reference, 2, 5)[0] % 40}
    ended = train(script(LONG, wait_for_it), kill=kill, mark=mark, reduction="exact", **SHRINK)
    assert agreed(ended) == agreed(reference), ended
    assert sizes(ended) == [RANKS - 1, RANKS], ended
    assert sorted(ended.state) == list(range(RANKS)), ended
    assert all(held in weights(reference) for held in weights(ended)), ended
    after = [attempt for _, at, attempt in ended.told if at.step > STEPS]
    assert not any(after), ended


def test_with_the_fast_reduction_losses_stay_as_near_as_rounding(train: Train) -> None:
    reference = train(script(), ranks=RANKS, spares=0, batch=BATCH)
    ended = train(script(), kill={1: moments(reference, 1, 3)[0]}, **SHRINK)
    assert ended.exit_code == 0, ended
    assert sizes(ended)[0] == RANKS - 1, ended
    there = agreed(reference)
    for at, (loss, *samples) in agreed(ended).items():
        assert loss == pytest.approx(there[at][0], rel=1e-5), ended
        assert samples == list(there[at][1:]), ended


def test_what_is_left_of_a_world_may_be_one_rank(train: Train) -> None:
    reference = train(script(), ranks=2, spares=0, batch=BATCH, reduction="exact")
    ended = train(script(), kill={0: moments(reference, 0, 2)[0]}, reduction="exact", **(SHRINK | {"ranks": 2}))
    assert agreed(ended) == agreed(reference), ended
    assert 1 in sizes(ended), ended


def test_a_rank_that_is_alone_has_all_there_is_and_nobody_else_has_it(train: Train) -> None:
    """Others can join it, as replicas; until then it takes snapshots."""

    def tell(run: Run, step: int) -> None:
        if step > 1 and run.world_size == 1:
            say(alone=run._world.replica_class.endswith(" alone"), bytes=run._units._snapshots.bytes)

    began_so = train(script(before=tell), ranks=1, spares=0, batch=BATCH)
    early = {0: 50}
    left_so = train(script(before=tell), kill=early, reduction="exact", **(SHRINK | {"ranks": 2}))
    for ended in (began_so, left_so):
        assert ended.exit_code == 0, ended
        told = [said for said in ended.said.values() if "alone" in said]
        assert told, ended
        assert not any(said["alone"] for said in told), ended
        assert all(said["bytes"] for said in told), ended


def test_below_the_fewest_ranks_allowed_it_waits_for_others(train: Train) -> None:
    reference = train(script(), ranks=2, spares=0, batch=BATCH)
    ended = train(script(), kill={0: moments(reference, 0, 2)[0]}, **(SHRINK | {"ranks": 2, "min_ranks": 2}))
    assert ended.exit_code == 0, ended
    assert sizes(ended) == [2], ended


class Dealt:
    """A framework's micro-batches."""

    def shards(self, step: int) -> int:
        return 6

    def samples_before(self, step: int) -> int:
        return 12 * step


def test_a_world_whose_samples_a_framework_deals_keeps_its_number_of_ranks(train: Train) -> None:
    def main(run: Run) -> None:
        run._batches._order = cast("Any", Dealt())
        script(3)(run)

    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert {ready.fixed for ready in ended.ready.values()} == {"a framework deals the samples to this number of ranks"}
