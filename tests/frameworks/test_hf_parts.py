"""The parts of the Trainer's adapter that need no job."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerCallback

from rackrun.errors import UsageError
from rackrun.frameworks.hf import loop_state, refusals
from rackrun.frameworks.hf.data_order import TrainerOrder
from rackrun.frameworks.hf.loop_state import LoopRecord
from rackrun.frameworks.hf.tokens import TokenLoader

pytestmark = pytest.mark.frameworks

RANKS, MICRO_BATCH = 2, 2


def loader(samples: int, rank: int, *, drop_last: bool = False) -> Any:
    """What accelerate makes of the stock Trainer's loader on ``rank``."""
    sampler = SeedableRandomSampler(range(samples), data_seed=3)
    batches = BatchSampler(sampler, MICRO_BATCH, drop_last=drop_last)
    sharded = BatchSamplerShard(batches, RANKS, rank)
    found: Any = DataLoader(range(samples), batch_sampler=sharded)  # type: ignore[arg-type]
    found.set_epoch = sampler.set_epoch
    return found


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize(
    ("samples", "drop_last"), [(8, False), (21, False), (24, False), (3, False), (8, True), (21, True), (24, True)]
)
def test_every_step_has_the_samples_of_the_stock_loop(samples: int, accumulation: int, drop_last: bool) -> None:
    order = TrainerOrder(loader(samples, 0, drop_last=drop_last), RANKS, accumulation, 0, 0)
    step = 0
    for epoch in range(3):
        of_rank = []
        for rank in range(RANKS):
            stock = loader(samples, rank, drop_last=drop_last)
            stock.set_epoch(epoch)
            of_rank.append(list(stock.batch_sampler))
        for first in range(0, len(of_rank[0]), accumulation):
            expected = [batch for batches in of_rank for batch in batches[first : first + accumulation]]
            assert order.shards(step) == len(expected)
            assert [order.ids(step, shard).tolist() for shard in range(len(expected))] == expected
            assert order.epoch(step) == epoch
            step += 1
    assert step == 3 * order.steps_per_epoch


def test_tokens_of_steps_that_are_over_do_not_wait() -> None:
    entered: list[int] = []

    def enter(step: int) -> bool:
        entered.append(step)
        return True

    tokens = TokenLoader(3, lambda step: 1 if step % 3 == 2 else 2, enter)
    tokens.begin(4)
    tokens.set_epoch(1)
    assert [(token.step, token.last) for token in tokens] == [(3, False), (3, True), (4, False), (4, True), (5, True)]
    assert entered == [4, 5]


def test_a_record_is_the_same_after_its_way_to_another_process() -> None:
    record = LoopRecord()
    record.step_done(4, "entered", '{"loss": 1.5}\n{"loss": NaN}', "results")
    record.phase_done("left", '{"eval_loss": 2.0}', ["own"])
    other = LoopRecord()
    other.load_state_dict(record.state_dict())
    assert vars(other) == vars(record)
    assert (other.logs, other.phases) == (2, [("left", 3, ["own"])])


def test_two_runs_of_a_training_have_comparable_records() -> None:
    """Without times, and without paths of the run."""
    records = []
    for folder, runtime in (("a", 1.5), ("b", 2.5)):
        record = LoopRecord()
        entered = json.dumps({"state": {"best_model_checkpoint": folder, "best_metric": 0.5}})
        record.step_done(4, entered, json.dumps({"eval_loss": 2.0, "eval_runtime": runtime}), "results")
        record.phase_done(entered, json.dumps({"eval_samples_per_second": runtime}), [""])
        records.append(record)
    one, other = records
    assert one.state_dict() != other.state_dict()
    assert one.comparable_state() == other.comparable_state()
    assert one.comparable_state()["history"] == [{"eval_loss": 2.0}, {}]
    assert one.comparable_state()["entered"] == {"state": {"best_metric": 0.5}}


class Keeps(TrainerCallback):  # type: ignore[misc]
    """A callback that keeps ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("value", [3, 0.5, "a", None, [1, {"a": 2}], np.float32(0.5), torch.tensor(2)])
def test_a_callback_may_keep_plain_values(value: Any) -> None:
    assert loop_state._of_callback(Keeps(value)) == {"state_dict": {"value": value}}


@pytest.mark.parametrize("value", [torch.zeros(3), {1: 2}, Path("a"), {4}, np.zeros(2)])
def test_a_callback_that_keeps_something_else_is_told_what_to_return(value: Any) -> None:
    with pytest.raises(UsageError, match=r"Keeps keeps .* numbers, texts, lists"):
        loop_state._of_callback(Keeps(value))


def test_this_version_of_transformers_is_known() -> None:
    refusals.refuse_version()


@pytest.mark.feature("HF Trainer", "a version with another loop", how="refused")
def test_another_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.Trainer, "_run_epoch", lambda self, model: None)
    with pytest.raises(UsageError, match=r"Trainer\._run_epoch is \(model\)"):
        refusals.refuse_version()


@pytest.mark.feature("HF Trainer", "a subclass of rackrun.hf.Trainer that overrides training_step", how="refused")
def test_a_subclass_that_overrides_the_step_is_told_what_to_write() -> None:
    mine = type("Mine", (), {"training_step": lambda self: None})
    with pytest.raises(UsageError, match=r"class ElasticMine\(rackrun\.hf\.Elastic, Mine\)"):
        refusals.refuse_class(mine)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.feature("HF Trainer", "streams (IterableDataset)", how="refused")
@pytest.mark.feature("HF Trainer", "batches of different sizes", how="refused")
def test_streams_and_batches_of_different_sizes_are_refused() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(world_size=1), accelerator=SimpleNamespace(even_batches=True))
    with pytest.raises(UsageError, match="is a stream"):
        refusals.refuse_loader(trainer, DataLoader(Stream()))
    with pytest.raises(UsageError, match="different sizes"):
        refusals.refuse_loader(trainer, DataLoader(torch.arange(4), batch_sampler=[[0], [1, 2]]))  # type: ignore[arg-type]


def refusable(**attributes: Any) -> Any:
    """A Trainer of which nothing is refused, but for ``attributes``; those of ``args`` are given as ``args``."""
    arguments = {"fsdp": "", "auto_find_batch_size": False, "ignore_data_skip": False, "n_gpu": 0, "world_size": 2}
    accelerator = SimpleNamespace(parallelism_config=None, dispatch_batches=None, split_batches=False)
    flags = ("is_distributed_loading_by_transformers", "is_model_parallel", "is_deepspeed_enabled", "is_fsdp_enabled")
    return SimpleNamespace(
        **dict.fromkeys(flags, False),
        hp_search_backend=None,
        accelerator=accelerator,
        **{**attributes, "args": SimpleNamespace(**{**arguments, **attributes.pop("args", {})})},
    )


@pytest.mark.parametrize(
    ("attributes", "what"),
    [
        pytest.param(
            {"_buffered_inputs": None},
            "generates its own training data",
            marks=pytest.mark.feature("TRL", "GRPOTrainer, RLOOTrainer, online DPO", how="refused"),
        ),
        ({"num_generations": 8}, "generates its own training data"),
        pytest.param(
            {"args": {"sync_ref_model": True}},
            "leave out sync_ref_model=True",
            marks=pytest.mark.feature("TRL", "DPOTrainer, sync_ref_model", how="refused"),
        ),
        pytest.param(
            {"args": {"precompute_ref_log_probs": True}},
            "leave out precompute_ref_log_probs=True",
            marks=pytest.mark.feature("TRL", "DPOTrainer, precompute_ref_log_probs", how="refused"),
        ),
        pytest.param(
            {"args": {"auto_find_batch_size": True}},
            "set per_device_train_batch_size",
            marks=pytest.mark.feature("HF Trainer", "auto_find_batch_size", how="refused"),
        ),
    ],
)
def test_what_would_train_something_else_is_refused_before_the_first_step(
    attributes: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        refusals.refuse_arguments(refusable(**attributes))


def test_the_arguments_that_trainers_have_by_default_are_not_refused() -> None:
    refusals.refuse_arguments(refusable(args={"sync_ref_model": False, "precompute_ref_log_probs": False}))
