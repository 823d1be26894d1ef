"""The parts of the adapter for Megatron-Core that need no job."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.errors import UsageError

pytestmark = pytest.mark.frameworks

with warnings.catch_warnings():  # of Megatron, that parts of it are missing, and of torch, which it compiles with
    warnings.simplefilter("ignore")
    import megatron.core
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from rackrun.frameworks.megatron import refusals
    from rackrun.frameworks.megatron.gradient_buffers import forget_collectives
    from rackrun.frameworks.megatron.main_parameters import MainParameters
    from rackrun.frameworks.megatron.other_state import OtherState

MISUSES = Path(__file__).parent / "scripts" / "misuse_megatron.py"


def stories(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.stories)


def model(config: Mapping[str, Any] = {}, **ddp: Any) -> list[Any]:
    """A model chunk with these settings, and nothing else of Megatron's: no process groups are needed for it."""
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(chunk)
    chunk.config = SimpleNamespace(**{"timers": None, **config})
    chunk.ddp_config = DistributedDataParallelConfig(**ddp)
    return [chunk]


def optimizer(kind: Any, inner: Any = None, **config: Any) -> Any:
    made = kind.__new__(kind)
    made.optimizer, made.config, made.is_stub_optimizer = inner, OptimizerConfig(**config), inner is None
    return made


@pytest.mark.feature("Megatron-Core", "another version", how="refused")
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals.refuse_version()
    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    with pytest.raises(UsageError, match=r"0\.17\.0 is not supported.*megatron-core==0\.16\.\*"):
        refusals.refuse_version()


@pytest.mark.feature("Megatron-Core", "pipeline, context and expert parallelism", how="refused")
@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"pipeline_model_parallel_size": 2}, "pipeline stages"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"expert_model_parallel_size": 4}, "expert parallelism"),
        ({"order": "tp-dp-pp"}, "order='tp-dp-pp'"),
    ],
)
def test_parallelism_that_was_not_tried_is_refused(sizes: dict[str, Any], named: str) -> None:
    refusals.refuse_sizes({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1})
    with pytest.raises(UsageError, match=named):
        refusals.refuse_sizes(sizes)


@pytest.mark.feature("Megatron-Core", "MoE, fp8, Megatron's FSDP and others", how="refused")
@pytest.mark.parametrize(
    ("chunks", "named"),
    [
        ([], "0 model chunks"),
        ([nn.Linear(1, 1)], "the first a Linear"),
        (model() + model(), "2 model chunks"),
        (model(use_megatron_fsdp=True), "Megatron's own FSDP"),
        (model(align_param_gather=True), "align_param_gather=True"),
        (model(check_for_large_grads=True), "check_for_large_grads=True"),
        (model({"fp8": "hybrid"}), "fp8"),
        (model({"num_moe_experts": 8}), "a mixture of experts"),
        (model({"cuda_graph_impl": "local"}), "CUDA graphs"),
        (model({"timers": object()}), "timers=..."),
    ],
)
def test_a_model_that_is_not_supported_is_refused(chunks: list[Any], named: str) -> None:
    refusals.refuse_model(model(overlap_grad_reduce=True, use_distributed_optimizer=True))
    with pytest.raises(UsageError, match=named):
        refusals.refuse_model(chunks)


@pytest.mark.parametrize(
    ("one", "named"),
    [
        (torch.optim.SGD([torch.zeros(1)]), "was given a SGD"),
        (optimizer(DistributedOptimizer, inner=SimpleNamespace()), "was given a DistributedOptimizer"),
        (optimizer(FP32Optimizer, optimizer_cpu_offload=True), "optimizer_cpu_offload"),
        (optimizer(FP32Optimizer, overlap_param_gather_with_optimizer_step=True), "between two parts"),
        (optimizer(FP32Optimizer, timers=lambda *_: None), "timers=..."),
    ],
)
def test_an_optimizer_that_is_not_supported_is_refused(one: Any, named: str) -> None:
    good = optimizer(FP32Optimizer, torch.optim.SGD([torch.zeros(1)]))
    refusals.refuse_optimizer(ChainedOptimizer([good]))
    with pytest.raises(UsageError, match=named):
        refusals.refuse_optimizer(one)
    with pytest.raises(UsageError, match=named):
        refusals.refuse_optimizer(ChainedOptimizer([one]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        stories("groups_made_elsewhere", "rackrun.megatron.initialize(run, ...) in main"),
        stories("another_mesh", 'mesh={"dp": -1, "tp": 2}'),
        stories("uneven_batch", "the global batch has 3 micro-batches for 2 data-parallel ranks"),
        ("no_begin", "call begin(step) of what rackrun.megatron.track has returned"),
    ],
)
def test_a_script_that_uses_it_otherwise_is_refused(misuse: str, said: str, run_rackrun: Any) -> None:
    ran = run_rackrun(["--standalone", "--nproc-per-node", 2, MISUSES, misuse], env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 1, ran
    assert said in ran.stderr


def test_the_module_of_main_parameters_has_what_the_optimizer_trains() -> None:
    half, single = torch.zeros(2), nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [half]}, {"params": [single], "lr": 0.1}]
    inner = torch.optim.SGD(groups)
    main = MainParameters(optimizer(FP32Optimizer, inner))
    assert [name for name, _ in main.named_parameters()] == ["group0_0", "group1_0"]
    assert [id(one) for one in main.parameters()] == [id(half), id(single)]


def test_shards_of_fp32_parameters_are_views_that_autograd_does_not_know() -> None:
    whole = nn.Parameter(torch.arange(6.0))
    shard: Any = whole.view(-1)[2:4]
    shard.shared = True
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], momentum=0.9)
    inner.param_groups[0]["params"] = [shard]
    inner.state[shard] = {"momentum_buffer": torch.ones(2)}
    made = optimizer(DistributedOptimizer, inner)
    made.shard_fp32_groups = [[shard]]
    (trained,) = MainParameters(made).parameters()
    assert trained is inner.param_groups[0]["params"][0] is made.shard_fp32_groups[0][0]
    assert trained.is_leaf
    assert trained.data_ptr() == shard.data_ptr()
    assert trained.shared
    assert list(inner.state) == [trained]


def test_other_state_comes_back_as_it_was() -> None:
    chunk: Any = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    scheduler = SimpleNamespace(num_steps=8)
    chunk[1].weight.requires_grad_(False)
    scaler = SimpleNamespace(_scale=torch.tensor([4.0]), _growth_tracker=1, _hysteresis_tracker=2)
    scaler.state_dict = lambda: {
        "scale": scaler._scale,
        "growth_tracker": scaler._growth_tracker,
        "hysteresis_tracker": scaler._hysteresis_tracker,
    }
    one = optimizer(FP32Optimizer)
    one.grad_scaler = scaler
    loaded: list[None] = []
    state = OtherState([chunk], one, scheduler, lambda: loaded.append(None))
    before = state.state_dict()
    kept = {**before, "model": [{name: value.clone() for name, value in before["model"][0].items()}]}
    assert "1.weight" in kept["model"][0]
    assert "0.weight" not in kept["model"][0]
    chunk(torch.randn(4, 2))
    chunk.eval()
    with torch.no_grad():
        chunk[1].weight.zero_()
    scheduler.num_steps, scaler._scale, scaler._growth_tracker = 16, torch.tensor([2.0]), 0
    state.load_state_dict(kept)
    assert len(loaded) == 1
    assert chunk.training
    assert chunk[0].training
    assert (scheduler.num_steps, scaler._scale.item(), scaler._growth_tracker) == (8, 4.0, 1)
    for name, value in state.state_dict()["model"][0].items():
        assert torch.equal(value, kept["model"][0][name]), name


def test_what_an_abandoned_step_has_begun_is_forgotten() -> None:
    def group() -> Any:
        return SimpleNamespace(
            grad_reduce_handle=object(),
            param_gather_handle=object(),
            param_gather_dispatched=True,
            is_first_batch=False,
            golden_per_param_grad_ready_counts={"a": 1},
            per_param_grad_ready_counts={"a": 1},
        )

    chunk = SimpleNamespace(bucket_groups=[group()], expert_parallel_bucket_groups=[group()])
    forget_collectives(chunk, order_too=False)
    for one in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        assert (one.grad_reduce_handle, one.param_gather_handle, one.param_gather_dispatched) == (None, None, False)
        assert one.golden_per_param_grad_ready_counts
    forget_collectives(chunk, order_too=True)
    for one in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        assert one.is_first_batch
        assert not one.golden_per_param_grad_ready_counts
        assert not one.per_param_grad_ready_counts


def test_importing_rackrun_imports_no_megatron() -> None:
    code = "import sys, rackrun; assert not [name for name in sys.modules if name.startswith('megatron')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
