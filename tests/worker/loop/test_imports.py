"""What a step needs is imported before it: a fork server imports once what each of its workers would import in its first step."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.hang_deadlines import _quantile
from rackrun.worker.steps.step import Step
from tests.worker.harness import say

STEPS = 8
"""After the fifth, deadlines come from the steps' own times."""


def main(run: Run) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader([torch.full((4,), n / 64) for n in range(64)])

    @run.step
    def train(step: Step) -> None:
        for x in loader:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    before = set(sys.modules)
    for step in run.steps(STEPS):
        train(step)
    say(imported=sorted(name for name in set(sys.modules) - before if not name.startswith("torch.")))


def test_no_step_imports_anything(train: Callable[..., Any]) -> None:
    ended = train(main, ranks=2, spares=0)
    assert ended.exit_code == 0, ended
    assert [told["imported"] for told in ended.said.values()] == [[], []]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_a_quantile_is_numpys(seconds: list[float]) -> None:
    assert _quantile(sorted(seconds), 0.99) == pytest.approx(float(np.quantile(seconds, 0.99)))
    assert _quantile(sorted(seconds), 0.5) == pytest.approx(statistics.median(seconds))
