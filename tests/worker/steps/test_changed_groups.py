"""A script takes parameters out of the optimizer's groups and adds them again later, and a rank is lost in between: the
bits are those of a run without a fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.worker.loop.run import Run
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.variants import in_stories
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, Samples, adam, ddp, fully_sharded, loss_of, net

Train = Callable[..., Ended]
Change = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def without_fault_and_with(train: Train, main: Callable[[Run, bool], None]) -> tuple[Ended, Ended]:
    return train(lambda run: main(run, False), ranks=2), train(lambda run: main(run, True), ranks=2)


def lose_rank_1(run: Run) -> None:
    if run.generation == 1:
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run._world.wait_broken()


# -- what the optimizer holds for parameters in no group -----------------------------------------------------------------
def out_and_in(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    parameters = list(model.parameters())
    if number == 2:
        optimizer.param_groups[0]["params"] = parameters[:2]
    if number == 5:
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.003})


def with_values_of_its_own(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Numbers, and tensors in a list, too."""
    if number == 1:
        for index, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["mine"] = [torch.full((3,), float(index)), index]
            optimizer.state[parameter]["scale"] = 1 + index / 8
    out_and_in(model, optimizer, number)
    for group in optimizer.param_groups[1:]:
        for parameter in group["params"]:
            held = optimizer.state[parameter]
            values, index = held.get("mine", [torch.zeros(3), 0])
            with torch.no_grad():
                parameter.mul_(1 - held.get("scale", 1.0) * index / 1000).add_(values.sum(), alpha=1e-4)


def a_group_that_comes_goes_and_comes_again(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Between, groups are as main has made them, and the optimizer has state for more than they hold."""
    parameters = list(model.parameters())
    if number == 0:
        optimizer.param_groups[0]["params"] = parameters[:2]
    if number in (1, 5):
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.003})
    if number == 2:
        del optimizer.param_groups[1]


@pytest.mark.parametrize("when", ["after", *in_stories("before")])
@pytest.mark.parametrize("at", [2, *in_stories(3)])
@pytest.mark.parametrize("change", [out_and_in, with_values_of_its_own, a_group_that_comes_goes_and_comes_again])
def test_state_of_parameters_in_no_group_outlives_a_lost_rank(change: Change, at: int, when: str, train: Train) -> None:
    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        parameters = list(model.parameters())
        optimizer = adam(model)
        if change is a_group_that_comes_goes_and_comes_again:
            optimizer = torch.optim.AdamW(parameters[:2], lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            number = int(step)
            if when == "before" and change is not with_values_of_its_own:
                change(model, optimizer, number)
            for batch_number, batch in enumerate(data):
                step.backward(loss_of(model, batch))
                if fault and (number, batch_number) == (at, 1):
                    lose_rank_1(run)
            optimizer.step()
            model.zero_grad()
            if when == "after" or change is with_values_of_its_own:
                change(model, optimizer, number)

        for number in run.steps(STEPS):
            step(number)

    reference, ended = without_fault_and_with(train, main)
    assert reference.exit_code == 0, reference
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


def thawing(run: Run, model: nn.Module, steps: int, at: int | None = None) -> None:
    """Train all in steps 0 and 1, all but the head up to step 5, and all again; lose rank 1 in step ``at``."""
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        out_and_in(model, optimizer, int(step))
        for number, batch in enumerate(data):
            step.backward(loss_of(model, batch))
            if (int(step), number) == (at, 1):
                lose_rank_1(run)
        optimizer.step()
        model.zero_grad()

    for number in run.steps(steps):
        step(number)


def sharded(run: Run) -> nn.Module:
    return fully_sharded(net())


@pytest.mark.parametrize(
    "at", [3, pytest.param(2, marks=pytest.mark.stories), pytest.param(5, marks=pytest.mark.stories)]
)
def test_shards_of_such_state_outlive_a_lost_rank(at: int, train: Train) -> None:
    reference, ended = without_fault_and_with(
        train, lambda run, fault: thawing(run, sharded(run), STEPS, at if fault else None)
    )
    assert reference.exit_code == 0, reference
    assert not ended.differences(reference), ended


@pytest.mark.parametrize("make", [ddp, sharded])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.stories)])
def test_a_resumed_job_has_the_state_of_parameters_in_no_group(
    make: Callable[[Run], nn.Module], ranks: int, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with fewer ranks, in which it has other shards."""
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "2")
    first = train(lambda run: thawing(run, make(run), 4), ranks=ranks)
    assert first.exit_code == 0, first
    second = train(lambda run: thawing(run, make(run), STEPS), ranks=2)
    assert second.exit_code == 0, second
    held = [path for path in first.state[0] if "/state/outside/" in path]
    assert held
    if ranks == 2:
        monkeypatch.delenv("RACKRUN_CHECKPOINT_DIR")
        reference = train(lambda run: thawing(run, make(run), STEPS), ranks=2)
        assert second.state == reference.state, second
    else:
        steps = [path for path in second.state[0] if path.endswith("/step")]
        assert len({second.state[0][path] for path in steps}) == 2  # 8 of some, and not 3 but 5 of the others


def test_a_discarded_step_puts_parameters_back_into_their_groups_with_what_the_optimizer_held() -> None:
    state = trained_state()
    optimizer, undo, plain = state.optimizers["optimizer"], UnitUndo(state), state.encode_plain()
    before = {path: tensor.clone() for path, tensor in state.tensors().items()}
    for audits in (True, False):
        undo.begin(whole=audits, audit=audits)
        del optimizer.param_groups[0]["params"][0]
        optimizer.add_param_group({"params": [state.parameters()[0]]})
        optimizer.param_groups[0]["params"].pop()
        assert any("/outside/" in path for path in state.tensors())
        if audits:
            optimizer.state[state.parameters()[1]]["exp_avg"].add_(1)
        assert not undo.discard(backward_open=True)
        assert state.encode_plain() == plain
        now = state.tensors()
        assert list(now) == list(before)
        assert all(torch.equal(now[path], tensor) for path, tensor in before.items())


def test_a_discarded_step_puts_back_what_the_script_has_removed_from_an_optimizer_before_the_gate() -> None:
    state = trained_state()
    optimizer, undo = state.optimizers["optimizer"], UnitUndo(state)
    first, second = state.parameters()
    before = {path: tensor.clone() for path, tensor in state.tensors().items()}
    for whole in (False, True):
        undo.begin(whole=whole)
        del optimizer.state[first]
        del optimizer.state[second]["exp_avg"]
        optimizer.state[second]["mine"] = torch.ones(1)
        assert not undo.discard(backward_open=True)
        now = state.tensors()
        assert list(now) == list(before)
        assert all(torch.equal(now[path], tensor) for path, tensor in before.items())
        assert [one is first for one in optimizer.state] == [True, False]


def test_state_that_a_step_removes_before_the_gate_outlives_a_lost_rank(train: Train) -> None:
    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        parameters = list(model.parameters())
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            if int(step) == 5:  # the learning rate follows what is thrown away
                norm = sum(optimizer.state.pop(one)["exp_avg"].norm() for one in parameters[2:])
                optimizer.param_groups[0]["lr"] = float(norm) / 100
            for batch_number, batch in enumerate(data):
                step.backward(loss_of(model, batch))
                if fault and (int(step), batch_number) == (5, 1):
                    lose_rank_1(run)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference, ended = without_fault_and_with(train, main)
    assert reference.exit_code == 0, reference
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


def trained_state() -> TrackedState:
    model = nn.Linear(3, 3)
    optimizer = adam(model)
    state = TrackedState()
    state.track("model", model)
    state.track("optimizer", optimizer)
    state.check_complete()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return state


# -- gradients of parameters that join a group ---------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "at", [None, 3, pytest.param(5, marks=pytest.mark.stories), pytest.param(6, marks=pytest.mark.stories)]
)
def test_gradients_that_have_piled_up_outside_of_the_optimizer_are_refused_when_it_gets_their_parameters(
    at: int | None, when: str, train: Train
) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[2:], lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            if when == "before" and int(step) == 5:
                optimizer.add_param_group({"params": parameters[:2]})
            for batch_number, batch in enumerate(data):
                step.backward(loss_of(model, batch))
                if (int(step), batch_number) == (at, 1):
                    lose_rank_1(run)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after" and int(step) == 5:
                optimizer.add_param_group({"params": parameters[:2]})

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=2)
    assert ended.exit_code == 1, ended
    assert "gradients of an older step were not cleared" in str(ended), ended


def of_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("place", ["first", *in_stories("last")])
@pytest.mark.parametrize("when", ["after", *in_stories("before")])
@pytest.mark.parametrize("at", [3, *in_stories(2, 5, 6)])
@pytest.mark.parametrize("clear", [of_the_model, in_place])
def test_parameters_without_older_gradients_join_an_optimizer_and_a_lost_rank_changes_nothing(
    clear: Callable[[nn.Module, torch.optim.Optimizer], None], at: int, when: str, place: str, train: Train
) -> None:
    """Cleared with the whole model; or frozen before, when the optimizer has left zeros."""

    def main(run: Run, fault: bool) -> None:
        model = ddp(run, find_unused_parameters=True)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        def change(number: int) -> None:
            if number == 1:
                optimizer.param_groups[0]["params"] = parameters[2:]
            if number == 5:
                optimizer.add_param_group({"params": parameters[:2]})
            if number in (1, 5) and clear is in_place:
                model.requires_grad_(number == 5)
                parameters[2].requires_grad_(True)
                parameters[3].requires_grad_(True)

        @run.step
        def step(step: Step) -> None:
            if place == "first":
                clear(model, optimizer)
            if when == "before":
                change(int(step))
            for batch_number, batch in enumerate(data):
                step.backward(loss_of(model, batch))
                if fault and (int(step), batch_number) == (at, 1):
                    lose_rank_1(run)
            optimizer.step()
            if place == "last":
                clear(model, optimizer)
            if when == "after":
                change(int(step))

        for number in run.steps(STEPS):
            step(number)

    reference, ended = without_fault_and_with(train, main)
    assert reference.exit_code == 0, reference
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


# -- gradients that are cleared in place ---------------------------------------------------------------------------------
@pytest.mark.parametrize("clears", ["first", "last"])
def test_a_layer_may_join_with_a_gradient_that_was_cleared_in_place(clears: str, train: Train) -> None:
    def main(run: Run, dies: bool) -> None:
        model = ddp(run, gradient_as_bucket_view=True)
        first, *_, last = model.module.children()
        optimizer = adam(last)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            if int(step) == 4:
                optimizer.add_param_group({"params": list(first.parameters())})
            if clears == "first":
                model.zero_grad(set_to_none=False)
            for batch in data:
                step.backward(loss_of(model, batch))
                if dies and int(step) == 4:
                    lose_rank_1(run)
            optimizer.step()
            if clears == "last":
                model.zero_grad(set_to_none=False)

        for number in run.steps(STEPS):
            step(number)

    reference, ended = without_fault_and_with(train, main)
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 1, ended
