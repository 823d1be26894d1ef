"""Lightning's Trainer under rackrun trains what it trains under torchrun, to the bit, whoever is lost at which moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import FrameworkJobs, same

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "train_lightning.py"
EPOCHS = {"max_epochs": 2, "checkpoint": {"monitor": "val_loss", "save_last": True}}
"""21 samples: epochs of six steps, of which the last has shorter micro-batches."""
ACCUMULATION = {
    "max_epochs": 2,
    "accumulate_grad_batches": 4,
    "gradient_clip_val": 0.5,
    "module": {"scheduler": {"interval": "step"}, "metric": True},
    "checkpoint": {"every_n_train_steps": 1, "save_top_k": -1},
}
"""Epochs of two steps, with four and two micro-batches."""
EARLY_STOPPING = {
    "max_epochs": 4,
    "val_check_interval": 2,
    "limit_train_batches": 5,
    "module": {"scheduler": "plateau"},
    "stop": {"monitor": "val_loss", "patience": 2},
    "checkpoint": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
}
MIXED_PRECISION = {
    "max_steps": 9,
    "samples": 24,
    "precision": "bf16-mixed",
    "gradient_clip_val": 0.1,
    "gradient_clip_algorithm": "value",
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": 2,
    "module": {"norm": True, "metric": True, "scheduler": {"interval": "epoch"}},
    "callbacks": {"EMAWeightAveraging": {"decay": 0.5}},
    "checkpoint": {},
}
AFTER_UPDATES = {"max_epochs": 2, "module": {"counts_updates": True}, "max_time": {"hours": 1}}
VALIDATED_FIRST = {"max_epochs": 1, "validate_first": True}
CASES: dict[str, dict[str, Any]] = {
    "epochs": EPOCHS,
    "accumulation": ACCUMULATION,
    "early stopping": EARLY_STOPPING,
    "mixed precision": MIXED_PRECISION,
    "after updates": AFTER_UPDATES,
    "validated first": VALIDATED_FIRST,
}


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns what the stock job of a case has written; each runs once."""
    known: dict[str, dict[str, Any]] = {}

    def trained(case: str) -> dict[str, Any]:
        if case not in known:
            jobs = FrameworkJobs(SCRIPT, tmp_path_factory.mktemp("stock"), lambda *_: None)
            known[case] = jobs.stock(CASES[case])
        return known[case]

    return trained


@pytest.fixture
def jobs(tmp_path: Path, run_rackrun: Callable[..., Any]) -> FrameworkJobs:
    return FrameworkJobs(SCRIPT, tmp_path, run_rackrun)


Stock = Callable[[str], dict[str, Any]]


@pytest.mark.feature("Lightning", "DDP, any rank lost, rank 0 too")
def test_the_main_process_is_killed_in_a_forward(jobs: FrameworkJobs, stock: Stock) -> None:
    same(stock("epochs"), jobs.elastic(EPOCHS, "8:0:KILL:forward"))


@pytest.mark.feature("Lightning", "a script that is not touched (--framework lightning)")
def test_a_script_that_is_not_touched_loses_a_rank_in_a_validation(jobs: FrameworkJobs, stock: Stock) -> None:
    options = ["--framework", "lightning"]
    found = jobs.elastic(EPOCHS, "6:1:KILL:validation", kind="framework", options=options)
    same(stock("epochs"), found)


@pytest.mark.feature("Lightning", "hooks and callbacks, called as often")
@pytest.mark.feature("Lightning", "accumulation, clipping, schedulers, bf16-mixed")
@pytest.mark.stories
@pytest.mark.parametrize("case", CASES)
def test_nobody_is_lost_and_hooks_are_called_as_often(case: str, jobs: FrameworkJobs, stock: Stock) -> None:
    same(stock(case), jobs.elastic(CASES[case]))


@pytest.mark.feature("Lightning", "validation, ModelCheckpoint, EarlyStopping, the sanity check")
@pytest.mark.stories
@pytest.mark.parametrize(
    ("case", "kill"),
    [
        ("epochs", "0:0:KILL:begin"),
        ("epochs", "0:0:KILL:sanity"),
        ("epochs", "5:0:STOP:end"),
        ("epochs", "3:1:STOP:update"),
        ("epochs", "12:1:KILL:end"),
        ("epochs", "6:0:KILL:save"),
        ("epochs", "12:0:KILL:epoch"),
        ("epochs", "4:0:KILL:forward,9:0:KILL:validation"),
        ("accumulation", "2:0:KILL:backward"),
        ("accumulation", "3:1:STOP:end"),
        ("accumulation", "2:0:KILL:save"),
        ("early stopping", "7:0:KILL:validation"),
        ("early stopping", "5:1:KILL:epoch"),
        ("mixed precision", "5:0:KILL:update"),
        ("mixed precision", "7:1:KILL:end"),
        ("after updates", "5:0:KILL:updated"),
        ("after updates", "8:1:KILL:forward"),
        ("validated first", "3:0:KILL:forward"),
    ],
)
def test_one_is_lost_at_another_moment(case: str, kill: str, jobs: FrameworkJobs, stock: Stock) -> None:
    same(stock(case), jobs.elastic(CASES[case], kill))


@pytest.mark.stories
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_an_exception_is_replaced_though_a_callback_saves_then(
    rank: int, jobs: FrameworkJobs, stock: Stock, tmp_path: Path
) -> None:
    saves: Any = {"OnExceptionCheckpoint": {"dirpath": str(tmp_path / "saved")}}
    same(stock("epochs"), jobs.elastic({**EPOCHS, "callbacks": saves}, f"5:{rank}:RAISE:forward"))
    assert not (tmp_path / "saved").exists(), "Lightning would go on from there"


@pytest.mark.feature("Lightning", "a metric of each rank's own for ReduceLROnPlateau", how="refused")
@pytest.mark.stories
def test_ranks_that_would_train_at_different_rates_are_refused(tmp_path: Path, run_rackrun: Callable[..., Any]) -> None:
    arguments = {**EPOCHS, "max_epochs": 4, "module": {"scheduler": "plateau", "own_metric": True}}
    ran = run_rackrun(
        ["--standalone", "--nproc-per-node", 2, SCRIPT, tmp_path, "elastic", "", json.dumps(arguments)],
        env={"OMP_NUM_THREADS": "1"},
    )
    assert ran.exit_code != 0
    assert "have different learning rates" in ran.stderr
    assert "sync_dist=True" in ran.stderr


@pytest.mark.feature("Lightning", "a job that goes on from --checkpoint-dir")
@pytest.mark.stories
def test_a_lost_job_goes_on_with_the_same_files(jobs: FrameworkJobs, stock: Stock) -> None:
    found = jobs.resumed(EPOCHS, "8:0:ALL:forward")
    same(stock("epochs"), found)


@pytest.mark.feature("Lightning", "the package pytorch_lightning")
@pytest.mark.stories
def test_the_other_name_of_the_package_works(jobs: FrameworkJobs, stock: Stock) -> None:
    pytest.importorskip("pytorch_lightning")
    found = jobs.elastic({**EPOCHS, "package": "pytorch_lightning"}, "8:0:KILL:backward")
    same(stock("epochs"), found)
