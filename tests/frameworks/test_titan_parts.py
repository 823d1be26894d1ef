"""The parts of torchtitan's adapter that need no job, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils

from rackrun.errors import StepError, UsageError
from rackrun.frameworks.titan import refusals
from rackrun.frameworks.titan.known_losses import KnownLosses
from rackrun.frameworks.titan.logged_values import LoggedValues
from rackrun.frameworks.titan.loop_record import LoopRecord
from rackrun.frameworks.titan.shard_batches import RankBatch, ShardBatches
from rackrun.worker.data.shard_reader import copied
from rackrun.worker.data.stream_states import digest_of
from tests.frameworks.titan_assets import make_assets

pytestmark = pytest.mark.frameworks

SCRIPTS = Path(__file__).parent / "scripts"
LOOP = """
import sys
sys.path.insert(0, {scripts!r})
import titan_on_cpu
from torchtitan import trainer
from rackrun.frameworks.titan import refusals, script_unchanged
"""
CLASSES = """
import rackrun.titan
from rackrun.errors import UsageError

class Own(trainer.Trainer):
    def train_step(self, data_iterator): ...

class Harmless(trainer.Trainer):
    def post_dataloading_process(self, input_dict, labels): ...

assert issubclass(script_unchanged._elastic(Harmless), rackrun.titan.Elastic)
for made in (lambda: script_unchanged._elastic(Own), lambda: type("T", (rackrun.titan.Elastic, Own), {})):
    try:
        made()
    except UsageError as error:
        print("refused", error)
refusals.torchtitan.__version__ = "0.4.0"
try:
    refusals.refuse_version()
except UsageError as error:
    print("refused", error)
"""


class Metrics:
    """The part of a MetricsProcessor that the adapter uses."""

    def __init__(self) -> None:
        self.logger = BaseLogger()
        self.ntokens_since_last_log, self.data_loading_times = 5, [0.5]
        self.said: list[Any] = []

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        assert extra_metrics
        self.said.append([step, global_avg_loss, global_max_loss, grad_norm])

    def log_validation(self, loss: float, step: int) -> None:
        self.said.append([loss, step])


def in_python(text: str) -> str:
    """Run ``text`` in a process of its own, as it changes torchtitan, and return what it prints."""
    text = LOOP.format(scripts=str(SCRIPTS)) + text
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.feature("torchtitan", "a subclass that overrides the step; another version", how="refused")
def test_classes_and_versions_that_are_not_known_are_refused() -> None:
    said = in_python(CLASSES).splitlines()
    assert [line.split()[0] for line in said] == ["refused"] * 3
    assert "Own overrides train_step" in said[0]
    assert "Own overrides train_step" in said[1]
    assert "torchtitan 0.4.0" in said[2]


@pytest.mark.slow
@pytest.mark.stories
@pytest.mark.feature(
    "torchtitan", "PP, CP, EP, compile, CUDA graphs, async checkpoints, loaders that end", how="refused"
)
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("parallelism.pipeline_parallel_degree", 2, "--parallelism.pipeline_parallel_degree 1"),
        ("parallelism.context_parallel_degree", 2, "--parallelism.context_parallel_degree 1"),
        ("parallelism.expert_parallel_degree", 2, "--parallelism.expert_parallel_degree 1"),
        ("parallelism.spmd_backend", "spmd_types", "--parallelism.spmd_backend partial_dtensor"),
        ("training.disable_cuda_graphs", False, "--training.disable_cuda_graphs"),
        ("training.enable_cpu_offload", True, "--training.no-enable_cpu_offload"),
        ("compile.enable", True, "--compile.no-enable"),
        ("dataloader.infinite", False, "--dataloader.infinite"),
        ("dataloader.num_workers", 1, "--dataloader.num_workers 0"),
        ("optimizer.implementation", "fused_opt_states_bf16", "--optimizer.implementation fused"),
        ("checkpoint.async_mode", "async", "--checkpoint.async_mode disabled"),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    name: str, value: Any, remedy: str, tmp_path: Path, run_rackrun: Callable[..., Any]
) -> None:
    make_assets(tmp_path / "assets")
    folder = tmp_path / "job"
    folder.mkdir()
    arguments = f'{{"save": 1, "set": {{"{name}": {str(value).lower() if isinstance(value, bool) else repr(value)}}}}}'
    given = ["--standalone", "--nproc-per-node", 1, SCRIPTS / "train_titan.py", folder, "elastic", ""]
    ran = run_rackrun([*given, arguments.replace("'", '"')], env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 1, ran
    assert f"write {remedy}" in ran.stderr, ran
    assert not list(folder.glob("told-*")), ran


@pytest.mark.feature(
    "torchtitan", "FP8, a mixture of experts, other loaders, optimizers and checkpoints", how="refused"
)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"post_optimizer_build_fn": print}, "mixture of experts"),
        ({"quantized": True}, "FP8"),
        ({"optimizer": "DistMuon"}, "the optimizer DistMuon"),
        ({"loader": BaseDataLoader}, "BaseDataLoader is no ParallelAwareDataloader"),
        ({"checkpoints": BaseDataLoader}, "checkpoints by BaseDataLoader"),
        ({"seed": True}, "create_seed_checkpoint"),
    ],
)
def test_parts_that_are_not_supported_are_refused(
    change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "has_quantization", lambda _: "quantized" in change)
    spec = {"name": "llama3", "flavor": "x", "model": None, "post_optimizer_build_fn": None}
    group = SimpleNamespace(optimizer_name=change.get("optimizer", "AdamW"))
    one = SimpleNamespace
    config = one(
        model_spec=one(**{name: change.get(name, value) for name, value in spec.items()}),
        optimizer=one(param_groups=[group], implementation="fused"),
        dataloader=one(_owner=change.get("loader", ParallelAwareDataloader), num_workers=0),
        checkpoint=one(
            _owner=change.get("checkpoints", CheckpointManager),
            enable=True,
            async_mode="disabled",
            create_seed_checkpoint="seed" in change,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(disable_cuda_graphs=True),
        compile=CompileConfig(),
        comm=one(mode="default"),
    )
    with pytest.raises(UsageError, match=named):
        refusals.refuse_config(config)


def test_step_hooks_of_the_container_are_refused() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(weights)
    refusals.refuse_hooks(optimizer)
    optimizer.register_step_post_hook(print)
    with pytest.raises(UsageError, match="step hook"):
        refusals.refuse_hooks(optimizer)


def test_a_rank_s_batch_stays_on_the_host_and_its_content_counts() -> None:
    batch = RankBatch(
        [({"input": torch.tensor([1])}, torch.tensor([2])), ({"input": torch.tensor([3])}, torch.tensor([4]))]
    )
    assert len(batch) == 2
    again = copied(batch, torch.device("meta"))
    assert again[1][1].device.type == "cpu"
    assert again[1][1] is not batch[1][1]
    assert digest_of(again) == digest_of(batch)
    again[1][1].add_(1)
    assert digest_of(again) != digest_of(batch)


def test_data_that_end_are_an_error() -> None:
    read = iter(ShardBatches([1, 2, 3], 2))
    assert list(next(read).values()) == [1, 2]
    with pytest.raises(StepError, match="before the last step"):
        next(read)


def test_the_losses_are_reduced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reduced(name: str, x: torch.Tensor, mesh: object) -> float:
        asked.append(name)
        return 10 * float(x)

    for name in ("dist_sum", "dist_max"):
        monkeypatch.setattr(dist_utils, name, partial(reduced, name))
    stock = dist_utils.dist_sum
    losses = KnownLosses()
    loss, average, tokens = torch.tensor(0.5), torch.tensor(float("nan")), torch.tensor(7)
    with losses.answering():
        losses.reduce(loss, average, tokens, None)
        assert asked == ["dist_sum", "dist_sum", "dist_max"]
        assert dist_utils.dist_sum(loss.clone(), None) == 5.0
        assert dist_utils.dist_sum(tokens.clone(), None) == 70.0
        assert dist_utils.dist_max(average.clone(), None) != 0
        assert len(asked) == 3
        assert dist_utils.dist_sum(torch.tensor(0.25), None) == 2.5
    assert len(asked) == 4
    assert dist_utils.dist_sum is stock


def test_what_is_logged_waits_for_the_commit() -> None:
    metrics = Metrics()
    logs = LoggedValues(metrics)
    with logs.held() as calls:
        metrics.log(1, 2.0, 3.0, 4.0, extra_metrics={"lr": 0.1})
    assert (metrics.said, calls) == ([], [["log", [1, 2.0, 3.0, 4.0], {"extra_metrics": {"lr": 0.1}}]])
    assert logs.losses(calls) == {"loss": 2.0, "grad_norm": 4.0}
    logs.deliver(calls)
    logs.deliver(None)
    assert metrics.said == [[1, 2.0, 3.0, 4.0]]


def test_an_abandoned_step_counts_no_tokens_and_no_times() -> None:
    metrics = Metrics()
    logs = LoggedValues(metrics)

    def attempt() -> None:
        with logs.held():
            metrics.ntokens_since_last_log += 8
            metrics.data_loading_times.append(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert (metrics.ntokens_since_last_log, metrics.data_loading_times) == (5, [0.5])
    metrics.log_validation(0.5, 1)
    assert metrics.said == [[0.5, 1]]


def test_a_record_comes_back_as_it_was() -> None:
    record, other = LoopRecord(), LoopRecord()
    record.step_done(4, 320)
    record.first, record.loaders = 3, [{"a": 1}, {"a": 2}]
    other.load_state_dict(record.state_dict())
    assert vars(other) == vars(record)


def test_importing_rackrun_imports_no_torchtitan() -> None:
    text = "import sys, rackrun; assert not any(name.startswith('torchtitan') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
