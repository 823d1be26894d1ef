"""Where two runs part, and what is said of it."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from rackrun.chaos.evidence.run_evidence import Trace
from rackrun.chaos.inprocess.state_recorder import StepState
from rackrun.chaos.oracles.training.diagnosis import first_difference, judge_script

STEPS = 4


def held(step: int, rank: int, **changes: Any) -> StepState:
    """``mean`` goes on from step to step; ``order`` stays."""
    usual = {
        "pid": 10 + rank,
        "tracked": {"model/param/w": f"w{step}", "optimizer/groups/0/lr": "0.1"},
        "reached": {"norm.mean": f"m{step}", "data.order": "abc"},
    }
    return StepState(step=step, rank=rank, **{"world": 2, **usual, **changes})


def gates(**losses: float) -> dict[tuple[int, int], bytes]:
    """``s2=0.5``: the loss of step 2."""
    return {(step, 0): struct.pack("<3d", losses.get(f"s{step}", 1.0 / (1 + step)), 4.0, 7.0) for step in range(STEPS)}


def trace(*others: StepState, **losses: float) -> Trace:
    """As usual, but for ``others``."""
    instead = {(one.step, one.rank): one for one in others}
    witness = [instead.get((step, rank), held(step, rank)) for step in range(STEPS + 1) for rank in range(2)]
    return Trace(gates(**losses), witness=witness)


def newcomer(step: int, **changes: Any) -> StepState:
    return held(step, 1, pid=99, **changes)


def test_equal_runs_have_no_difference_whatever_is_not_tracked() -> None:
    assert judge_script(trace(), trace(newcomer(2, reached={"norm.mean": "else"})), trace()) is None


def test_state_that_nobody_tracked_is_named_with_who_did_not_get_it() -> None:
    lost = newcomer(2, reached={"norm.mean": "m0", "data.order": "abc"})
    found = judge_script(trace(), trace(lost, newcomer(3), newcomer(4), s2=0.4), trace())
    assert found is not None
    assert (found.kind, found.step) == ("untracked", 2)
    assert "the loss of step 2 is 0.4 instead of 0.333" in found.what
    assert (
        "norm.mean, which the step function reaches, is not tracked: the process that took over as rank 1" in found.what
    )
    assert "taken over: rank 1 by another process, which did step 2 first" in found.facts
    assert "tracked: before step 2 all 2 tensors and values are equal, on all ranks" in found.facts
    assert "not tracked: norm.mean on rank 1: m0, and m2 without faults" in found.facts
    assert "run.track(norm=norm)" in found.remedy


def test_tracked_state_that_differs_first_is_named_with_what_the_step_before_it_came_from() -> None:
    """A scheduler that was forgotten: the loss shows it a step later than the learning rate."""
    lost = newcomer(2, reached={"norm.mean": "m0"})
    wrong = newcomer(3, tracked={"model/param/w": "w3", "optimizer/groups/0/lr": "0.5"})
    found = judge_script(trace(), trace(lost, wrong, s3=0.9), trace())
    assert found is not None
    assert found.kind == "untracked"
    assert "before step 3, optimizer/groups/0/lr differs" in found.what
    assert "tracked: optimizer/groups/0/lr on rank 1: 0.5, and 0.1 without faults" in found.facts
    assert (
        "tracked: before step 2 all 2 tensors and values are equal, on all ranks, and so is the loss of step 2"
        in found.facts
    )
    assert "norm.mean" in found.what


def test_what_a_step_that_is_done_again_does_twice_is_said() -> None:
    again = held(2, 0, attempt=1, reached={"norm.mean": "m3", "data.order": "abc"})
    found = judge_script(trace(), trace(again, s2=0.4), trace())
    assert found is not None
    assert found.kind == "untracked"
    assert "where the step was done again it was not put back" in found.what
    assert "took over" not in found.what


def test_what_never_changes_and_is_other_on_the_newcomer_was_built_otherwise() -> None:
    other = [newcomer(step, reached={"norm.mean": f"m{step}", "data.order": "xyz"}) for step in (2, 3, 4)]
    found = judge_script(trace(), trace(*other, s2=0.4), trace())
    assert found is not None
    assert found.kind == "built otherwise"
    assert "has built data.order otherwise" in found.what
    assert "may not depend on run.rank" in found.remedy


def test_a_script_that_is_not_repeatable_is_not_blamed_on_the_faults() -> None:
    found = judge_script(trace(), trace(s1=0.4), trace(s0=0.7))
    assert found is not None
    assert (found.kind, found.step) == ("not repeatable", 0)
    assert "does not do the same twice, without any fault: the loss of step 0 is 0.7 instead of 1.0" in found.what
    assert "seeds before every step" in found.remedy


def test_a_model_that_is_built_otherwise_each_time_differs_before_the_first_step() -> None:
    other = [held(0, rank, tracked={"model/param/w": "?", "optimizer/groups/0/lr": "0.1"}) for rank in range(2)]
    found = judge_script(trace(), trace(*other), trace(*other))
    assert found is not None
    assert (found.kind, found.step) == ("not repeatable", 0)
    assert "before step 0, model/param/w differs" in found.what
    assert "what the model is built from" in found.remedy


def test_what_differs_between_runs_without_faults_and_does_no_harm_is_no_suspect() -> None:
    lost = newcomer(2, reached={"norm.mean": "m0", "data.order": "abc"})
    noisy = [held(step, 1, reached={"norm.mean": f"m{step}", "data.order": f"{step}?"}) for step in range(STEPS + 1)]
    found = judge_script(trace(*noisy), trace(lost, s2=0.4), trace())
    assert found is not None
    assert not [fact for fact in found.facts if "data.order" in fact]


def test_another_number_of_ranks_is_said_to_be_the_reason() -> None:
    alone = [held(step, 0, world=1) for step in (2, 3, 4)]
    without = replace(trace(s3=0.4), witness=[one for one in trace().witness if one.step < 2] + alone)
    found = judge_script(trace(), without, trace())
    assert found is not None
    assert (found.kind, found.step) == ("world", 3)
    assert "from step 2 on it has 1 ranks instead of 2, and step 3 is the first that differs" in found.what
    assert 'reduction="exact"' in found.remedy


def test_nothing_to_name_is_said_and_asks_for_a_report() -> None:
    found = judge_script(trace(), trace(s2=0.4), trace())
    assert found is not None
    assert found.kind == "unknown"
    assert "report" in found.remedy
    blind = judge_script(Trace(gates()), Trace(gates(s2=0.4)), None)
    assert blind is not None
    assert "--step-by-step" in blind.remedy


def test_the_first_difference_is_the_first_in_the_order_of_training() -> None:
    late = held(3, 0, tracked={"model/param/w": "?"})
    found = first_difference(trace(), trace(late, s2=0.4))
    assert found is not None
    assert (found.step, found.where) == (2, "loss")
    earlier = first_difference(trace(), trace(held(2, 0, tracked={"model/param/w": "?"}), s2=0.4))
    assert earlier is not None
    assert earlier.where == "before"
