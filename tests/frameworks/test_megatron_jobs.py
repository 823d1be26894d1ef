"""Megatron-Core under rackrun trains what it trains alone under torchrun, to the bit, whoever is lost at which moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import FrameworkJobs, same

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "train_megatron.py"
PLAIN: dict[str, Any] = {}
SHARDED = {"distributed": True, "bits": 16}
OVERLAPPED = {**SHARDED, "overlap": True}
TENSOR_PARALLEL = {**OVERLAPPED, "tp": 2, "dropout": 0.1}
SCALED = {"fp16": True, "distributed": True}
"""Its first three steps are skipped: the loss scale begins too high."""
EVALUATED = {"distributed": True, "evaluate": 2, "dropout": 0.1}


@pytest.fixture
def compare(tmp_path: Path, run_rackrun: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that compares Megatron alone with a job of rackrun's in which one is struck."""

    def compared(arguments: dict[str, Any], kill: str, *, by_hand: bool = False) -> None:
        ranks = 2 * arguments.get("tp", 1) * arguments.get("instances", 1)
        jobs = FrameworkJobs(SCRIPT, tmp_path, run_rackrun, ranks)
        same(jobs.stock(arguments), jobs.elastic({**arguments, "by_hand": by_hand}, kill))

    return compared


@pytest.mark.feature("Megatron-Core", "distributed optimizer, bf16, any rank lost, rank 0 too")
def test_rank_0_is_killed_in_the_gradient_norm(compare: Callable[..., None]) -> None:
    compare(SHARDED, "3:0:KILL:norm")


@pytest.mark.feature("Megatron-Core", "tensor parallelism")
def test_a_tensor_parallel_rank_is_killed(compare: Callable[..., None]) -> None:
    compare(TENSOR_PARALLEL, "3:2:KILL:norm")


@pytest.mark.feature("Megatron-Core", "its DistributedDataParallel, overlapped collectives, accumulation, clipping")
@pytest.mark.stories
@pytest.mark.parametrize(
    "kill", ["0:0:KILL:norm", "3:0:KILL:forward", "3:1:STOP:forward", "4:0:KILL:applied", "5:1:KILL:end"]
)
@pytest.mark.parametrize("arguments", [PLAIN, SHARDED, OVERLAPPED, {"bits": 16, "overlap": True}], ids=str)
def test_one_is_lost_at_another_moment(arguments: dict[str, Any], kill: str, compare: Callable[..., None]) -> None:
    compare(arguments, kill)


@pytest.mark.feature("Megatron-Core", "two optimizer instances")
@pytest.mark.stories
def test_a_shard_of_two_optimizer_instances_comes_from_its_replica(compare: Callable[..., None]) -> None:
    compare({**SHARDED, "instances": 2}, "3:2:KILL:norm")


@pytest.mark.feature("Megatron-Core", "a loss per token")
@pytest.mark.stories
def test_a_loss_per_token(compare: Callable[..., None]) -> None:
    compare({**SHARDED, "tokens": True}, "3:1:KILL:norm")


@pytest.mark.feature("Megatron-Core", "fp16, skipped steps")
@pytest.mark.stories
@pytest.mark.parametrize("kill", ["", "1:0:KILL:end", "3:1:KILL:norm"])
def test_steps_that_are_skipped_because_of_an_overflow(kill: str, compare: Callable[..., None]) -> None:
    compare(SCALED, kill)


@pytest.mark.feature("Megatron-Core", "evaluation")
@pytest.mark.stories
@pytest.mark.parametrize("arguments", [EVALUATED, {**OVERLAPPED, "evaluate": 2}], ids=str)
@pytest.mark.parametrize("kill", ["3:0:KILL:evaluation", "4:1:KILL:begin"])
def test_phases_find_the_model_s_parameters_whole(
    arguments: dict[str, Any], kill: str, compare: Callable[..., None]
) -> None:
    compare(arguments, kill)


@pytest.mark.stories
def test_who_takes_rank_0_over_is_lost_while_it_enters_main_again(
    tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    jobs = FrameworkJobs(SCRIPT, tmp_path, run_rackrun)
    two_spares = ["--nproc-per-node", 4, "--spares", 2]
    found = jobs.elastic(SHARDED, "3:0:KILL:norm,2:0:KILL:entry", options=two_spares)
    assert list(tmp_path.glob("*/struck-1"))
    same(jobs.stock(SHARDED), found)


@pytest.mark.stories
@pytest.mark.parametrize("kill", ["3:0:STOP:norm", "4:1:KILL:applied"])
def test_a_step_function_that_calls_megatron_itself(kill: str, compare: Callable[..., None]) -> None:
    compare(SHARDED, kill, by_hand=True)


@pytest.mark.feature("Megatron-Core", "a job that goes on from --checkpoint-dir")
@pytest.mark.stories
@pytest.mark.parametrize("arguments", [PLAIN, SHARDED, SCALED], ids=str)
def test_a_job_goes_on_from_its_checkpoint(
    arguments: dict[str, Any], tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    jobs = FrameworkJobs(SCRIPT, tmp_path, run_rackrun)
    stock = jobs.stock(arguments)
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 2]
    jobs.elastic({**arguments, "steps": 4}, options=options)
    resumed = jobs.elastic(arguments, options=options)
    for rank, expected in stock.items():
        told = resumed[rank].pop("told")
        assert 0 < len(told) < len(expected["told"])
        assert told == expected.pop("told")[-len(told) :]
    same(stock, resumed)


@pytest.mark.stories
def test_a_checkpoint_of_other_shards_is_refused(tmp_path: Path, run_rackrun: Callable[..., Any]) -> None:
    options = ["--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 2]
    FrameworkJobs(SCRIPT, tmp_path, run_rackrun).elastic({**SHARDED, "steps": 4}, options=options)
    folder = tmp_path / "more"
    folder.mkdir()
    given = [SCRIPT, folder, "elastic", "", '{"distributed": true, "bits": 16}']
    ran = run_rackrun(["--standalone", "--nproc-per-node", 4, *options, *given], env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code != 0, ran
    assert "shard0of4" in ran.stderr
