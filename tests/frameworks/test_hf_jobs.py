"""The Trainer under rackrun trains what it trains under torchrun, to the bit, whoever is lost at which moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import FrameworkJobs, same
from tests.variants import in_stories

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "train_hf.py"
EPOCHS = {
    "num_train_epochs": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
    "include_num_input_tokens_seen": "all",
}
"""21 samples: epochs of three steps, of which the last is padded."""


@pytest.fixture(scope="session")
def stock_epochs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return FrameworkJobs(SCRIPT, tmp_path_factory.mktemp("stock"), lambda *_: None).stock(EPOCHS)


@pytest.fixture
def jobs(tmp_path: Path, run_rackrun: Callable[..., Any]) -> FrameworkJobs:
    return FrameworkJobs(SCRIPT, tmp_path, run_rackrun)


@pytest.mark.feature("HF Trainer", "DDP, any rank lost, rank 0 too")
@pytest.mark.feature("HF Trainer", "gradient accumulation, clipping, schedulers")
def test_the_main_process_is_killed_in_a_forward(
    jobs: FrameworkJobs, stock_epochs: dict[str, Any], tmp_path: Path
) -> None:
    same(stock_epochs, jobs.elastic(EPOCHS, "4:0:KILL:forward"))
    assert len(list(tmp_path.rglob("begun-*"))) == 2, "the successor's callbacks see how far the training is"


@pytest.mark.feature("HF Trainer", "a script that is not touched (--framework hf)")
@pytest.mark.feature("HF Trainer", "evaluation, saving, load_best_model_at_end")
def test_a_script_that_is_not_touched_loses_a_rank_in_an_evaluation(
    jobs: FrameworkJobs, stock_epochs: dict[str, Any]
) -> None:
    options = ["--framework", "hf"]
    same(stock_epochs, jobs.elastic(EPOCHS, "3:1:KILL:evaluation", kind="framework", options=options))


@pytest.mark.stories
@pytest.mark.feature("HF Trainer", "callbacks, called as often")
@pytest.mark.feature("HF Trainer", "a subclass with metrics of its own (compute_loss, log)")
def test_nobody_is_lost_and_callbacks_are_called_as_often(jobs: FrameworkJobs, stock_epochs: dict[str, Any]) -> None:
    same(stock_epochs, jobs.elastic(EPOCHS))


@pytest.mark.stories
@pytest.mark.parametrize(
    "kill",
    ["0:0:KILL:begin", "2:1:STOP:forward", "3:0:KILL:evaluation", "3:0:KILL:save", "5:1:KILL:end", "4:0:STOP:begin"],
)
def test_one_is_lost_at_another_moment(kill: str, jobs: FrameworkJobs, stock_epochs: dict[str, Any]) -> None:
    same(stock_epochs, jobs.elastic(EPOCHS, kill))


@pytest.mark.feature("HF Trainer", "the Trainer's own class")
@pytest.mark.parametrize("kill", ["4:0:KILL:forward", *in_stories("", "3:1:STOP:evaluation", "5:0:KILL:end")])
def test_losses_of_the_trainers_own_class_travel_with_the_gate(kill: str, jobs: FrameworkJobs) -> None:
    own_class = {**EPOCHS, "subclass": False}
    same(jobs.stock(own_class), jobs.elastic(own_class, kill))


@pytest.mark.parametrize("kill", ["4:1:KILL:forward", *in_stories("", "3:0:KILL:forward", "4:0:KILL:begin")])
def test_attributes_that_grow_in_a_step_come_to_the_successor_whole(kill: str, jobs: FrameworkJobs) -> None:
    """They do not fit in what travels with the gate of step 3: it is refused, and done again with more room."""
    wordy = {**EPOCHS, "wordy": True}
    same(jobs.stock(wordy), jobs.elastic(wordy, kill))


@pytest.mark.stories
@pytest.mark.feature("HF Trainer", "evaluate() before train()")
def test_ranks_train_one_model_after_an_evaluation(run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    script = SCRIPT.parent / "evaluate_first.py"
    ran = run_rackrun(["--standalone", "--nproc-per-node", 2, script, tmp_path], env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 0, ran
    assert (tmp_path / "0.txt").read_text() == (tmp_path / "1.txt").read_text()
