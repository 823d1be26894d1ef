"""Each script of examples/tasks loses rank 0 and rank 1, and trains what it trains without that."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos import Kill, exactly, inject, seq

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(400)]

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
PLAN = seq(inject(Kill(), exactly("rank", 0), step=3), inject(Kill(), exactly("rank", 1), step=7))
TWO: dict[str, Any] = {"ranks": 2, "spares": 2}
FOUR: dict[str, Any] = {"ranks": 4, "spares": 2}


@pytest.mark.parametrize(
    ("script", "job", "needs"),
    [
        pytest.param("finetune_hf", {**TWO, "args": ["{out}"]}, "transformers"),
        pytest.param("accelerate_loop", TWO, "accelerate"),
        pytest.param("lora", TWO, "", marks=pytest.mark.feature("Plain loops", "LoRA, frozen parameters")),
        pytest.param("ema", TWO, "", marks=pytest.mark.feature("Plain loops", "EMA of the weights")),
        pytest.param("gan", TWO, "", marks=pytest.mark.feature("Plain loops", "GAN, two optimizers in a step")),
        pytest.param("rl", TWO, "", marks=pytest.mark.feature("Plain loops", "RL, run.do and run.phase")),
        pytest.param("tensor_parallel", FOUR, "", marks=pytest.mark.feature("Plain loops", "FSDP2 and TP")),
        pytest.param("pipeline", FOUR, "", marks=pytest.mark.feature("Plain loops", "pipeline stages by hand")),
    ],
)
def test_an_example_loses_two_ranks(script: str, job: dict[str, Any], needs: str, chaos: Any) -> None:
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    chaos.survives(TASKS / f"{script}.py", plan=PLAN, **job)


def test_each_example_is_tried() -> None:
    marks = next(mark for mark in test_an_example_loses_two_ranks.pytestmark if mark.name == "parametrize")
    assert {case.values[0] for case in marks.args[1]} == {path.stem for path in TASKS.glob("*.py")}
