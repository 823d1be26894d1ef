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
JOB: dict[str, Any] = {
    "ranks": 2,
    "spares": 2,
    "args": ["{out}", "framework", "", json.dumps(ARGUMENTS)],
    "options": ["--framework", "hf"],
}
BOTH = seq(inject(Kill(), exactly("rank", 1), step=2), inject(Kill(), exactly("rank", 0), step=6))


@pytest.mark.feature("HF Trainer", "rackctl chaos run, and the pytest fixture chaos")
def test_a_job_with_kills_is_the_one_without(chaos: Any) -> None:
    """But for the number of calls that the script's callback has counted: it has no state that could be restored."""
    chaos.survives(SCRIPT, plan=BOTH, may_differ=["calls"], **JOB)


def test_a_callback_that_counts_is_named(chaos: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"calls\.calls\['step_begin'\]"):
        chaos.survives(SCRIPT, plan=BOTH, **JOB)
