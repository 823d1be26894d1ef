"""A step that a rank has died in is done again with the same bits, whatever the script has changed in it, and however.

Each script is killed at places of a step that are told by the moments of a run without a fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.protocol.ids import EVERY, Position
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, Swap
from tests.worker.scripts import STEPS, Samples, Script, adam, ddp, fit, loss_of
from tests.worker.steps.early_changes import (
    adversaries,
    clamped_weights,
    codebook,
    guard_skips_and_ema,
    momentum_encoder,
    random_choices_between_steps,
    reduced_loss_and_plateau,
    scaler_skips_and_ema,
    scheduler_before_the_gate,
    sharded_adversaries,
    target_network,
    weights_averaged_in_a_phase,
)

Train = Callable[..., Ended]


def places(reference: Ended, rank: int, step: int, phase: int = 0) -> list[int]:
    """The moments of one unit: from the commit before it to its own."""
    lived = reference.moments[rank]
    ends = next(i for i, what in enumerate(lived) if what == f"committed Position(step={step}, phase={phase})")
    begins = max(i for i, what in enumerate(lived[:ends]) if what.startswith("committed"))
    return list(range(begins + 1, ends + 1))


def spread(all_of_them: Sequence[int], count: int) -> list[int]:
    """About ``count`` of them, the last three among them."""
    return sorted(
        {all_of_them[round(i * (len(all_of_them) - 1) / (count - 1))] for i in range(count)} | {*all_of_them[-3:]}
    )


def killed_in(train: Train, main: Script, step: int, *, phase: int = 0, count: int = 4, rank: int = 1) -> None:
    reference = train(main, ranks=2)
    assert reference.exit_code == 0, reference
    for at in spread(places(reference, rank, step, phase), count):
        ended = train(main, ranks=2, kill={rank: at}, start_over=True)
        what = f"{reference.moments[rank][at]}\n{ended}"
        assert not ended.differences(reference), f"{ended.differences(reference)}\n{what}"
        assert ended.said == reference.said, what
        assert not ended.restarted, what
        assert ended.plans, what


@pytest.mark.parametrize(
    ("main", "step"),
    [
        (scaler_skips_and_ema, 4),
        (guard_skips_and_ema, 4),
        (scheduler_before_the_gate, 4),
        (momentum_encoder, 5),
        (codebook, 5),
        (clamped_weights, 5),
        (target_network, 4),
        (adversaries, 5),
        (reduced_loss_and_plateau, 5),
        (random_choices_between_steps, 5),
    ],
    ids=lambda one: one.__name__ if callable(one) else str(one),
)
@pytest.mark.stories
def test_a_step_that_is_killed_anywhere_is_done_again_with_the_same_bits(main: Script, step: int, train: Train) -> None:
    killed_in(train, main, step)


@pytest.mark.stories
def test_a_phase_that_changes_parameters_is_done_again_with_the_same_bits(train: Train) -> None:
    killed_in(train, weights_averaged_in_a_phase, 5, phase=EVERY + 1)


@pytest.mark.stories
def test_a_sharded_step_of_parts_is_done_again_with_the_same_bits(train: Train) -> None:
    reference = train(sharded_adversaries, ranks=2, snapshot_every=1)
    assert reference.exit_code == 0, reference
    for at in spread(places(reference, 1, 5), 5):
        ended = train(sharded_adversaries, ranks=2, kill={1: at}, snapshot_every=1, start_over=True)
        assert not ended.differences(reference), f"{reference.moments[1][at]}\n{ended}"
        assert not ended.restarted, ended


def test_who_takes_over_from_one_that_had_taken_over_knows_what_a_step_is_like(train: Train, tmp_path: Path) -> None:
    """Shards come from the snapshot that the lost one had made of what it was given."""

    def main(run: Run) -> None:
        def dies(step: Step) -> None:
            marks = [tmp_path / "first", tmp_path / "second"]
            if run.rank == 1 and int(step) == 5 and (due := [mark for mark in marks if not mark.exists()]):
                due[0].touch()
                os.kill(os.getpid(), signal.SIGKILL)

        sharded_adversaries(run, between=dies)

    reference = train(sharded_adversaries, ranks=2, snapshot_every=4)
    ended = train(main, ranks=2, spares=2, snapshot_every=4, deadline_s=60.0)
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 2, ended


@pytest.mark.parametrize(
    "main", [adversaries, scaler_skips_and_ema, reduced_loss_and_plateau], ids=lambda main: main.__name__
)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.stories
def test_a_kill_before_a_script_is_known_changes_no_bit(main: Script, step: int, train: Train) -> None:
    """What its first steps show is not known yet: at the worst everything begins again."""
    reference = train(main, ranks=2)
    for at in spread(places(reference, 1, step)[1:] if step else list(range(1, places(reference, 1, 1)[0])), 5):
        ended = train(main, ranks=2, kill={1: at}, start_over=True)
        assert not ended.differences(reference), f"{reference.moments[1][at]}\n{ended}"
        assert not (step > 1 and ended.restarted), f"{reference.moments[1][at]}\n{ended}"


@pytest.mark.stories
def test_two_deaths_one_after_the_other_in_a_step_of_parts(train: Train) -> None:
    reference = train(adversaries)
    first, second = places(reference, 0, 4), places(reference, 2, 6)
    for at, later in ((first[-2], second[-4]), (first[len(first) // 2], second[-1])):
        ended = train(adversaries, kill={0: at, 2: later}, spares=2)
        assert not ended.differences(reference), ended
        assert not ended.restarted


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_change_between_two_steps_through_data_is_refused_or_costs_the_one_rank_that_has_it(
    everywhere: bool, train: Train
) -> None:
    """On all ranks it is the script; on one it may be a GPU's memory, and another takes its place."""

    def main(run: Run) -> None:
        model = ddp(run)

        def between(step: int) -> None:
            if step == 1 and (everywhere or (run.rank, run.generation) == (1, 1)):
                next(model.parameters()).data.mul_(1.5)

        fit(run, model, adam(model), between=between)

    ended = train(main, ranks=2)
    if everywhere:
        assert ended.exit_code == 1, ended
        assert ended.failure is not None
        assert "model/param/module.0.weight was changed between two steps" in ended.failure.message
    else:
        assert len(ended.plans) == 1, ended
        assert not ended.differences(train(lambda run: fit(run, model := ddp(run), adam(model)), ranks=2))


@pytest.mark.parametrize(
    ("variables", "how"),
    [
        ({"RACKRUN_CHECK_REPLICAS": "2"}, {}),
        ({"RACKRUN_NAN_PROBATION": "1"}, {}),
        ({}, {"swap": Swap(Position(4), lost=1)}),
        ({}, {"min_ranks": 1, "spares": 0, "reduction": "fast"}),
    ],
    ids=["replicas are compared", "a loss that is not finite", "a planned swap", "a shrink"],
)
@pytest.mark.stories
def test_a_step_of_parts_with_what_else_there_is(
    variables: dict[str, str], how: dict[str, Any], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reference = train(adversaries, **{key: value for key, value in how.items() if key != "swap"})
    assert reference.exit_code == 0, reference
    kill = {} if "swap" in how else {1: places(reference, 1, 5)[-4]}
    ended = train(adversaries, kill=kill, **how)
    assert ended.exit_code == 0, ended
    assert not ended.restarted, ended
    assert ended.plans, ended
    if "min_ranks" not in how:
        assert not ended.differences(reference), ended


def stages_with_other_buffers_and_averages(run: Run) -> None:
    stage = run.mesh["pp"].get_local_rank()
    extra = [nn.BatchNorm1d(14), *([nn.BatchNorm1d(14, affine=False)] if stage else [])]
    model = ddp(run, nn.Sequential(*extra), process_group=run.mesh["dp"].get_group())
    optimizer, average = adam(model), torch.optim.swa_utils.AveragedModel(model.module, use_buffers=True)
    run.track(model=model, optimizer=optimizer, average=average)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        average.update_parameters(model.module)
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def test_ranks_whose_buffers_are_not_of_one_size_exchange_them_too(train: Train) -> None:
    ended = train(stages_with_other_buffers_and_averages, ranks=4, spares=0, mesh={"dp": 2, "pp": 2})
    assert ended.exit_code == 0, ended


@pytest.mark.stories
def test_a_loss_that_is_made_up_in_a_step_of_parts_is_computed_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run, made_up: bool) -> None:
        model, other = ddp(run), ddp(run)
        first, second = adam(model), adam(other)
        run.track(model=model, other=other, first=first, second=second)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            batches = list(data)
            bad = made_up and (int(step), step.attempt, run.rank) == (4, 0, 1)
            for model_, optimizer in ((model, first), (other, second)):
                for index, batch in enumerate(batches):
                    model_.require_backward_grad_sync = index == len(batches) - 1
                    step.backward(loss_of(model_, batch) * (float("nan") if bad and model_ is other else 1.0))
                optimizer.step()
                optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    monkeypatch.setenv("RACKRUN_NAN_PROBATION", "1")
    reference = train(lambda run: main(run, False), ranks=2)
    assert not train(lambda run: main(run, True), ranks=2).differences(reference)
