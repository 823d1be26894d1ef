"""The torch that is installed: what rackrun needs of its private parts is tried, and what fails is refused where it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.testing._internal.distributed.fake_pg import FakeStore

from rackrun.errors import StepError, UsageError
from rackrun.worker.loop.run import Run
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.torch_compat import c10d, feature_probe, require
from rackrun.worker.torch_compat.data_parallel import fsdp, fsdp_reduce
from rackrun.worker.torch_compat.install import _problems
from tests.worker import torch_versions
from tests.worker.forked import forked
from tests.worker.scripts import ddp, net

Patch = pytest.MonkeyPatch


def test_this_torch_passes_every_trial() -> None:
    assert forked(feature_probe.problems) == {}


def cannot_be_set(patch: Patch) -> None:
    """Torch 2.15: what rackrun wrote to until then."""
    patch.setattr(FSDPParam, "unsharded_accumulated_grad", property(lambda _: None), raising=False)
    patch.setattr(fsdp, "_accumulated", lambda param: torch.ones(2) if param else None)


def reset_forgets_nothing(patch: Patch) -> None:
    patch.setattr(FSDPState, "_reset_iter_state", lambda self: None, raising=False)
    patch.setattr(fsdp, "reset", lambda subs: None)


def reset_forgets_too_much(patch: Patch) -> None:
    """Torch 2.15, without what rackrun does about it."""

    def begin(subs: Any, keep: object) -> None:
        for param in fsdp.params(subs):
            param.sharded_param.grad = None

    patch.setattr(fsdp, "_begin", begin)


def no_buckets(patch: Patch) -> None:
    patch.delattr(DistributedDataParallel, "_build_params_for_reducer")


def no_hook(patch: Patch) -> None:
    patch.setattr(DistributedDataParallel, "register_comm_hook", lambda self, state, hook: None)


def another_reduction(patch: Patch) -> None:
    patch.setattr(_fsdp_param_group, "foreach_reduce", lambda params, grads: None)


def nothing_to_add_up(patch: Patch) -> None:
    patch.setattr(fsdp_reduce, "local_gradients", lambda module: iter(()))


def another_norm(patch: Patch) -> None:
    patch.setattr(clip_grad, "clip_grad_norm_", lambda parameters, norm: torch.ones(()))


def no_coordinate(patch: Patch) -> None:
    patch.setattr(DeviceMesh, "get_coordinate", lambda self: [1])


@pytest.mark.parametrize(
    ("spoil", "needs"),
    [
        (cannot_be_set, {"fsdp"}),
        (reset_forgets_nothing, {"fsdp"}),
        (reset_forgets_too_much, {"fsdp"}),
        (no_buckets, {"ddp"}),
        (no_hook, {"ddp exact"}),
        (another_reduction, {"fsdp exact"}),
        (nothing_to_add_up, {"fsdp exact"}),
        (another_norm, {"norm exact"}),
        (no_coordinate, {"fsdp place"}),
    ],
)
def test_a_torch_that_does_otherwise_fails_its_trial(
    spoil: Callable[[Patch], None], needs: set[str], monkeypatch: Patch
) -> None:
    def work() -> list[str]:
        spoil(monkeypatch)
        return sorted(feature_probe.problems())

    assert needs <= set(forked(work))


def test_what_failed_is_refused_where_it_is_used(monkeypatch: Patch) -> None:
    monkeypatch.setitem(_problems, "fsdp", "AttributeError: no setter")
    require("ddp", "ddp exact")
    with pytest.raises(UsageError, match=r"FSDP2.*no setter"):
        require("fsdp", "fsdp place")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_script_is_refused_only_what_this_torch_cannot_do(
    sharded: bool, train: Callable[..., Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(feature_probe, "known_problems", lambda: {"fsdp": "AttributeError: no setter"})

    def main(run: Run) -> None:
        run.track(model=fully_shard(net()) if sharded else ddp(run))

    ended = train(main, ranks=2, max_restarts=0)
    assert ended.exit_code == int(sharded), ended
    if sharded:
        assert "FSDP2" in ended.failure.message


def test_only_success_is_remembered(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = [{"fsdp": "out of memory"}, {}]
    monkeypatch.setattr(feature_probe, "problems", lambda: found.pop(0))
    assert feature_probe.known_problems() == {"fsdp": "out of memory"}
    assert feature_probe.known_problems() == {}
    assert feature_probe.known_problems() == {}
    monkeypatch.setattr(torch.version, "git_version", "another")
    with pytest.raises(IndexError):
        feature_probe.known_problems()


def test_a_script_that_makes_or_destroys_groups_leaves_the_elastic_one_in_place() -> None:
    def work() -> list[bool]:
        c10d.install()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        c10d.adopt_default_group()
        dist.destroy_process_group()
        distributed_c10d.destroy_process_group()
        dist.init_process_group("of no such backend")
        here = dist.is_initialized()
        c10d.forget_groups()
        return [here, dist.is_initialized()]

    assert forked(work) == [True, False]


def test_ddp_over_tensor_parallelism_as_torch_joins_them_is_refused() -> None:
    def work() -> str:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        with pytest.raises(StepError, match="exchanges its parameters") as refused:
            TrackedState().track("model", DistributedDataParallel(model, device_mesh=mesh["dp"]))
        return refused.value.remedy

    assert "fully_shard" in forked(work)


def test_the_tests_that_try_another_torch_in_brief_are_there() -> None:
    workers = torch_versions.ROOT / "tests" / "worker"
    assert [name for name in torch_versions.BRIEF if not (workers / name).is_file()] == []


def test_the_trials_that_are_told_of_another_torch_are_run_by_its_interpreter() -> None:
    told = subprocess.run([sys.executable, "-c", torch_versions.TRIALS], check=True, capture_output=True, text=True)
    found = json.loads(told.stdout.strip().rpartition("\n")[2])
    assert found == [[what, None] for what, _ in feature_probe.TRIALS.values()]
