"""Trainers of TRL under rackrun train and log what they do under torchrun, with a kill, and with PEFT's adapters alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import FrameworkJobs, same

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "train_trl.py"


@pytest.mark.parametrize(
    ("arguments", "kill"),
    [
        pytest.param({"trainer": "sft"}, "3:0", marks=pytest.mark.feature("TRL", "SFTTrainer, loss of the completion")),
        pytest.param(
            {"trainer": "sft", "packing": True, "packing_strategy": "wrapped", "completion_only_loss": False},
            "3:1",
            marks=pytest.mark.feature("TRL", "SFTTrainer, packed samples"),
        ),
        pytest.param({"trainer": "sft", "lora": True}, "2:0", marks=pytest.mark.feature("PEFT", "LoRA, SFTTrainer")),
        pytest.param({"trainer": "dpo"}, "3:0", marks=pytest.mark.feature("TRL", "DPOTrainer, a reference model")),
        pytest.param({"trainer": "dpo", "lora": True}, "3:1", marks=pytest.mark.feature("PEFT", "LoRA, DPOTrainer")),
        pytest.param({"trainer": "reward"}, "3:1", marks=pytest.mark.feature("TRL", "RewardTrainer")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_a_trainer_of_trl_loses_a_rank(
    arguments: dict[str, Any], kill: str, tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    jobs = FrameworkJobs(SCRIPT, tmp_path, run_rackrun)
    stock = jobs.stock(arguments)
    same(stock, jobs.elastic(arguments, kill))
    trained = stock["0"]["trained"]
    assert all("lora" in name for name in trained) == bool(arguments.get("lora"))
