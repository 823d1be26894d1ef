"""``batch="scale_lr"``: the global batch and the learning rates follow the world, and are those of a run to which nothing happened but
that it had these batches: one process is told of them, and computes the same bits."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rackrun.protocol.ids import Position
from rackrun.worker.batch.lr_rule import ScaleLR
from rackrun.worker.data.rng import derive, reseed
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.forked_worker import hash_of
from tests.worker.harness import Ended
from tests.worker.harness import say as said_by
from tests.worker.scripts import Samples, Script, adam, ddp, fully_sharded, loss_of, net

Train = Callable[..., Ended]
Worlds = tuple[int, Sequence[tuple[int, int]]]
RANKS, BATCH, STEPS, LONG = 4, (24, 2), 12, 40
MOMENTS = {"replicated": (30, 85), "sharded": (190, 310)}
SCALE = ScaleLR("sqrt", warmup_steps=3)
SHRINK = {
    "min_ranks": 1,
    "policy": "swap,shrink,wait",
    "ranks": RANKS,
    "spares": 0,
    "batch": BATCH,
    "scale": SCALE,
    "reduction": "exact",
}
ALONE = {"ranks": 1, "spares": 0, "batch": BATCH, "scale": SCALE, "reduction": "exact"}


def replicated(run: Run) -> nn.Module:
    return ddp(run, nn.LayerNorm(14))


def sharded(run: Run) -> nn.Module:
    model = net(nn.LayerNorm(14))
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    return fully_sharded(model)


def hybrid(run: Run) -> nn.Module:
    model = net(nn.LayerNorm(14))
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=run.mesh)
    return fully_sharded(model, mesh=run.mesh)


def script(
    make: Callable[[Run], nn.Module],
    *,
    steps: int = STEPS,
    worlds: Worlds | None = None,
    before: Callable[[Run, int], None] = lambda run, step: None,
    workers: int = 0,
) -> Script:
    """``worlds``: it is told that the world was of these sizes, whatever it is."""
    told: dict[int, list[float]] = {}

    def main(run: Run) -> None:
        if worlds is not None:
            run._batches._worlds = lambda: worlds
        model = make(run)
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LONG)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        data = run.loader(Samples(), num_workers=workers)

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            own = optimizer.param_groups[0]["lr"]
            scheduler.step()
            told[int(step)] = [step.samples, step.batch_size, step.lr_factor, own]
            assert run.global_batch_size == step.batch_size

        def tell() -> None:
            held = {path: _whole(tensor) for path, tensor in model.named_parameters()}
            for index, values in optimizer.state_dict()["state"].items():
                held |= {f"{index}/{key}": _whole(value) for key, value in values.items()}
            said_by(
                whole={path.removeprefix("module."): hash_of(t.numpy().tobytes()) for path, t in held.items()},
                told=told,
            )

        run.at_end(tell)
        for number in run.steps(steps):
            before(run, number)
            step(number)

    return main


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def sizes(ended: Ended) -> list[int]:
    """Of the world, after each change."""
    return [size for size, _ in itertools.groupby(plan.world_size for plan in ended.plans)]


def assert_same_training(ended: Ended, worlds: Worlds, reference: Ended) -> None:
    """Every loss, the samples of every step, the learning rates, and what all hold in the end, bit for bit."""
    assert (ended.exit_code, reference.exit_code) == (0, 0), ended
    assert {at: gate[:3] for at, gate in ended.gates.items()} == {
        at: gate[:3] for at, gate in reference.gates.items() if at in ended.gates
    }, f"{worlds}\n{ended}"
    twice = {at.step for at, counts in ended.counts.items() if len(counts) > 1}
    assert twice <= {first for first, _ in worlds[1]}, (
        "one that only lost ranks had seen committed may change, no other"
    )
    # by all that lived to tell: how many there were, and a digest, is in the gates
    for at, by_rank in ended.ids.items():
        delivered = [sample for ids in by_rank.values() for sample in ids]
        assert len(set(delivered)) == len(delivered), f"{at}\n{ended}"
        assert set(delivered) <= set(reference.samples(at)), f"{at}\n{ended}"
    expected = reference.said[0]
    for rank, said in ended.said.items():
        assert said["whole"] == expected["whole"], f"rank {rank}, {worlds}\n{ended}"
        assert said["told"].items() <= expected["told"].items(), f"rank {rank}, {worlds}\n{ended}"


def at_random(seed: int, make: Callable[[Run], nn.Module], ranks: Sequence[int]) -> dict[int, int]:
    """At which moment of its life each of them dies: not in its first steps, nor in its last."""
    rng = random.Random(seed)
    return {rank: rng.randrange(*MOMENTS[make.__name__]) for rank in ranks}


def worlds_of(ended: Ended) -> Worlds:
    return RANKS, ended.plans[-1].worlds


def order_of(epoch: int) -> list[int]:
    found: list[int] = np.random.Generator(np.random.PCG64(derive(7, "epoch", epoch))).permutation(60).tolist()
    return found


def by_hand(ranks: Sequence[int], factors: Sequence[float]) -> tuple[list[float], list[list[int]]]:
    """The loss of every step, and its samples: an ordinary loop over steps of so many ranks."""
    reseed(7, "setup")
    model, data = net(nn.LayerNorm(14)), Samples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LONG)
    losses, samples, epoch, left = [], [], 0, order_of(0)
    for step, (size, factor) in enumerate(zip(ranks, factors, strict=True)):
        batch = 6 * size
        if len(left) < batch:
            epoch, left = epoch + 1, order_of(epoch + 1)
        ids, left = left[:batch], left[batch:]
        total = 0.0
        for shard in range(3 * size):
            reseed(7, "shard", step, shard)
            loss = loss_of(model, torch.stack([data[i] for i in ids[2 * shard : 2 * shard + 2]])) / (3 * size)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = own * factor
        optimizer.step()
        optimizer.param_groups[0]["lr"] = own
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
        samples.append(sorted(ids))
    return losses, samples


# -- what it computes
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.stories)])
def test_it_computes_what_an_ordinary_loop_over_these_batches_does(workers: int, train: Train) -> None:
    worlds = RANKS, ((0, 4), (2, 3), (5, 1), (7, 4))
    ended = train(script(replicated, worlds=worlds, workers=workers), **(ALONE | {"reduction": "fast"}))
    ranks = [4] * 2 + [3] * 3 + [1] * 2 + [4] * 5
    third = math.sqrt(0.75)
    factors = [1, 1, third, third, third, 0.5, 0.5, 0.625, 0.75, 0.875, 1, 1]
    losses, samples = by_hand(ranks, factors)
    assert list(ended.losses.values()) == pytest.approx(losses, rel=1e-5), ended
    assert [ended.samples(Position(step)) for step in range(STEPS)] == samples
    told = ended.said[0]["told"]
    assert [told[str(step)][2] for step in range(STEPS)] == factors
    assert [told[str(step)][1] for step in range(STEPS)] == [6 * size for size in ranks]
    assert [told[str(step)][0] for step in range(STEPS)] == [6 * sum(ranks[:step]) for step in range(STEPS)]


@pytest.mark.stories
def test_as_long_as_nothing_happens_it_is_the_training_with_a_constant_batch(train: Train) -> None:
    how = {"ranks": 3, "spares": 0, "reduction": "exact"}
    ended, constant = train(script(replicated), scale="scale_lr", **how), train(script(replicated), **how)
    assert ended.losses == constant.losses
    assert ended.said[0] == constant.said[0]
    assert ended.ids == constant.ids


# -- while the world changes
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.stories) for seed in range(2, 9))])
def test_ddp_whose_ranks_are_lost_at_any_moment_trains_on_what_is_left(seed: int, train: Train) -> None:
    kill = at_random(seed, replicated, ((2,), (0, 3), (1, 2, 3))[seed % 3])
    ended = train(script(replicated), kill=kill, **SHRINK)
    assert min(sizes(ended)) < RANKS, ended
    assert not ended.restarted, ended
    worlds = worlds_of(ended)
    assert_same_training(ended, worlds, train(script(replicated, worlds=worlds), **ALONE))


@pytest.mark.stories
@pytest.mark.parametrize("seed", range(1, 8))
def test_fsdp_that_goes_back_to_a_snapshot_and_shrinks_does_those_steps_again_with_the_batch_that_they_had(
    seed: int, train: Train
) -> None:
    kill = at_random(seed, sharded, ((2,), (0,))[seed % 2])
    ended = train(script(sharded), kill=kill, snapshot_every=3, **SHRINK)
    assert min(sizes(ended)) < RANKS, ended
    assert not ended.restarted, ended
    worlds = worlds_of(ended)
    if seed == 1:
        assert worlds[1][1][0] - ended.plans[0].committed.step > 2, "it does go back"
    assert_same_training(ended, worlds, train(script(sharded, worlds=worlds), **ALONE))


@pytest.mark.stories
def test_a_mesh_that_loses_a_replica_keeps_the_micro_batches_of_the_other(train: Train) -> None:
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    ended = train(script(hybrid), kill=at_random(3, sharded, (2,)), mesh=mesh, **SHRINK)
    assert sizes(ended)[0] == 2, ended
    worlds = worlds_of(ended)
    assert worlds[1][1][1] == 2, ended
    assert_same_training(ended, worlds, train(script(sharded, worlds=worlds), **ALONE))


@pytest.mark.parametrize("make", [pytest.param(replicated, marks=pytest.mark.stories), sharded])
def test_a_step_of_fewer_micro_batches_than_ranks_is_done_again_by_all_of_them(make: Any, train: Train) -> None:
    """What one rank has committed, and then a world that has grown again."""
    how = {**ALONE, "batch": (8, 2)}
    worlds = 4, ((0, 4), (2, 1), (4, 3), (6, 4))
    ended = train(script(make, steps=8, worlds=worlds), **(how | {"ranks": 4}))
    assert [ended.said[0]["told"][str(step)][1] for step in range(8)] == [8, 8, 2, 2, 6, 6, 8, 8]
    assert_same_training(ended, worlds, train(script(make, steps=8, worlds=worlds), **how))


@pytest.mark.stories
@pytest.mark.parametrize("make", [replicated, sharded])
def test_a_rank_that_comes_back_brings_its_micro_batches(make: Any, train: Train, tmp_path: Path) -> None:
    mark = tmp_path / "ready"

    def wait_for_it(run: Run, step: int) -> None:
        while step == STEPS and run.world_size < RANKS and not mark.exists():
            time.sleep(0.01)

    ended = train(
        script(make, steps=LONG, before=wait_for_it),
        kill=at_random(5, make, (2,)),
        mark=mark,
        snapshot_every=1,
        **SHRINK,
    )
    worlds = worlds_of(ended)
    assert sizes(ended) == [RANKS - 1, RANKS], ended
    assert [size for _, size in worlds[1]] == [4, 3, 4], ended
    assert_same_training(ended, worlds, train(script(make, steps=LONG, worlds=worlds), **ALONE))
    changed = [line for line in ended.story if "BatchChanged" in line]
    assert len(changed) == (RANKS - 1) + RANKS, ended


@pytest.mark.stories
@pytest.mark.parametrize("make", [replicated, sharded])
def test_a_job_that_goes_on_from_a_checkpoint_with_fewer_ranks_goes_on_with_their_batch(
    make: Any, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once more with all of them; 3 ranks could not share the whole batch evenly."""
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "100")
    batch = {**ALONE, "batch": (32, 2)}
    train(script(make, steps=3), **(batch | {"ranks": 4}))
    train(script(make, steps=6), **(batch | {"ranks": 3}))
    ended = train(script(make, steps=12), **(batch | {"ranks": 8}))
    monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
    worlds = 4, ((0, 4), (3, 3), (6, 4))
    assert_same_training(ended, worlds, train(script(make, steps=12, worlds=worlds), **batch))


# -- refusals
def refused(train: Train, **how: Any) -> str:
    ended = train(script(replicated), max_restarts=0, **(SHRINK | {"reduction": "fast"} | how))
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    assert not ended.losses, "refused before anything is trained"
    return ended.failure.message


def by_rank(batch: int, full_batch: int) -> float:
    return batch / full_batch * (1 + 1e-12 * int(os.environ["RANK"]))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"scale": ScaleLR(lambda batch, full: 1.0 if batch > 6 else float("nan"))}, "a batch of 6 of 24 samples"),
        ({"scale": ScaleLR(by_rank)}, "not say the same on all ranks"),
        ({"batch": (22, 2)}, "4 ranks share 11"),
    ],
)
def test_what_cannot_work_is_refused_before_training(how: dict[str, Any], says: str, train: Train) -> None:
    assert says in refused(train, **how)


def by_newcomer(batch: int, full_batch: int) -> float:
    return batch / full_batch * (0.5 if os.environ["LOCAL_RANK"] == "4" else 1.0)


@pytest.mark.stories
def test_a_newcomer_whose_rule_says_something_else_is_found_at_the_next_gate(train: Train) -> None:
    how = {**SHRINK, "scale": ScaleLR(by_newcomer), "spares": 1, "max_restarts": 0}
    ended = train(script(replicated), kill=at_random(1, replicated, (2,)), **how)
    assert ended.failure is not None, ended
    assert "what a learning-rate rule says" in ended.failure.message


def test_an_optimizer_without_a_learning_rate_is_refused(train: Train) -> None:
    def main(run: Run) -> None:
        model = replicated(run)
        optimizer = adam(model)
        optimizer.param_groups[0]["lr"] = None
        run.track(model=model, optimizer=optimizer)
        next(iter(run.steps(1)))

    ended = train(main, max_restarts=0, **SHRINK)
    assert ended.failure is not None
    assert "no learning rate" in ended.failure.message
