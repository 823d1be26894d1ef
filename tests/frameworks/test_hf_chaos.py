"""`rackctl chaos run` with a Trainer's script that is not touched: what is compared, and what is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos import Kill, exactly, inject, seq

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "train_hf.py"
ARGUMENTS = {"num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
JOB: dict[str, Any] = {"ranks": 2, "spares": 2, "options": ["--framework", "hf"]}
BOTH = seq(inject(Kill(), exactly("rank", 1), step=2), inject(Kill(), exactly("rank", 0), step=6))


@pytest.mark.feature("HF Trainer", "rackctl chaos run, and the pytest fixture chaos")
def test_a_job_with_kills_is_the_one_without(chaos: Any) -> None:
    chaos.survives(SCRIPT, plan=BOTH, args=given(ARGUMENTS), **JOB)


def test_a_callback_that_counts_in_an_object_is_named(chaos: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"calls\.tally"):
        chaos.survives(SCRIPT, plan=BOTH, args=given({**ARGUMENTS, "tally": True}), **JOB)


def given(arguments: dict[str, Any]) -> list[str]:
    return ["{out}", "framework", "", json.dumps(arguments)]
