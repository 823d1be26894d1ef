"""The same for sharded models. A lost shard comes from a live replica (HSDP, TP with DP) or from a snapshot (FSDP2)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, moments
from tests.worker.scripts import STEPS, WIDTH, Samples, Script, adam, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]


def sharded(**options: Any) -> nn.Module:
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_sharded(model, **options)


def fsdp(run: Run) -> None:
    """14 and 10 rows over 3 ranks: the last holds less."""
    model = sharded()
    fit(run, model, adam(model))


def fsdp_compiled(run: Run) -> None:
    model = sharded()
    fit(run, torch.compile(model, backend="aot_eager"), adam(model))  # type: ignore[arg-type]


def fsdp_kept_gathered(run: Run) -> None:
    model = sharded(reshard_after_forward=False)
    fit(run, model, adam(model))


def fsdp_mixed_precision(run: Run) -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fit(run, model, adam(model, fused=True))


def fsdp_clipped(run: Run) -> None:
    model = sharded()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


def fsdp_validated(run: Run) -> None:
    """A forward without a backward leaves the root's whole parameters where its shards belong, in a phase, after the loop, and in two phases."""
    model = sharded()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data, apart = run.loader(Samples()), torch.ones(3, WIDTH)

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    def validate() -> None:
        with torch.no_grad():
            run.log(sum=float(model(apart.to(run.device)).sum()))

    def with_gradients() -> None:
        model(apart.to(run.device))

    run.every(2, validate)
    run.every(3, with_gradients)
    run.at_end(validate)
    for number in run.steps(STEPS):
        step(number)
    validate()


def row_sizes(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor of another shape than its tensor, where that has rows."""
    return tensor.detach().abs() if tensor.dim() == 1 else tensor.detach().abs().mean(-1, keepdim=True)


class Average:
    """Of DTensors, by hand. ``fills``: load_state_dict copies into what there is; else it keeps what it is given. ``late``: there is
    nothing before the first update, so a newcomer has no such tensor."""

    def __init__(self, model: nn.Module, *, fills: bool, late: bool = False) -> None:
        self.fills = fills
        self.values = {} if late else {path: p.detach().clone() for path, p in model.named_parameters()}
        self.sums: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for path, parameter in model.named_parameters():
            if path not in self.values:
                self.values[path] = parameter.detach().clone()
            self.values[path].mul_(0.9).add_(parameter, alpha=0.1)
        self.sums = [row_sizes(value) for value in self.values.values()]

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "sums": list(self.sums)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for path, value in state["values"].items():
            if self.fills and path in self.values:
                self.values[path].copy_(value)
            else:
                self.values[path] = value.clone()
        self.sums = list(state["sums"])


def averaging(run: Run, model: nn.Module, average: Average) -> None:
    def after(_: int) -> None:
        average.update(model)
        assert all(isinstance(one, DTensor) for one in [*average.values.values(), *average.sums])

    fit(run, model, adam(model, foreach=False), after=after, average_by_hand=average)


def fsdp_averaged(run: Run) -> None:
    model = sharded()
    averaging(run, model, Average(model, fills=True))


def fsdp_averaged_late(run: Run) -> None:
    model = sharded()
    averaging(run, model, Average(model, fills=False, late=True))


class Lion(torch.optim.Optimizer):
    """As people write it: state that is made in the first step, in a list and in tensors of another shape than the parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["recent"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
                    state["rows"] = row_sizes(parameter)
                state["recent"][0].lerp_(parameter.grad, 0.1)
                state["recent"][1].lerp_(parameter.grad, 0.01)
                state["rows"].mul_(0.9).add_(row_sizes(parameter), alpha=0.1)
                assert isinstance(state["rows"], DTensor)
                update = (state["recent"][0] + state["recent"][1]).sign()
                parameter.add_(update * state["rows"].clamp(0.1, 1), alpha=-group["lr"])


def fsdp_lion(run: Run) -> None:
    model = sharded()
    fit(run, model, Lion(model))


@pytest.mark.parametrize(
    "main",
    [
        fsdp,
        *(
            pytest.param(main, marks=pytest.mark.stories)
            for main in (
                fsdp_averaged,
                fsdp_averaged_late,
                fsdp_lion,
                fsdp_validated,
                fsdp_kept_gathered,
                fsdp_mixed_precision,
                fsdp_clipped,
                fsdp_compiled,
            )
        ),
    ],
    ids=lambda main: main.__name__,
)
def test_a_lost_shard_is_computed_again_from_a_snapshot(main: Script, train: Train) -> None:
    reference = train(main, snapshot_every=4)
    assert reference.exit_code == 0, reference
    rank = random.Random(main.__name__).choice((0, 2))  # the newest snapshot before its loss is of step 4
    late = [index for index, what in enumerate(reference.moments[rank]) if "(step=5" in what]
    deaths = {rank: random.Random(main.__name__).choice(late)}
    ended = train(main, kill=deaths, snapshot_every=4)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{deaths}\n{ended}"
    assert ended.rolled_back, ended


def hsdp(run: Run) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    fit(run, model, adam(model))


def hsdp_averaged(run: Run) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    averaging(run, model, Average(model, fills=False, late=True))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(batch)))
        return out


def tensor_parallel(run: Run) -> None:
    """Two groups of two: each shard of the model is on two ranks."""
    model = Mlp()
    parallelize_module(model, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=run.mesh["dp"])
    fit(run, model, adam(model, foreach=False))


def tensor_parallel_averaged(run: Run) -> None:
    model = Mlp()
    parallelize_module(model, run.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=run.mesh["dp"])
    averaging(run, model, Average(model, fills=True))


def redistribute(run: Run) -> None:
    """A DTensor is re-laid in every step: all-to-all and all-gather under autograd."""
    mesh = run.mesh
    model = net()
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            (loss_of(model, batch) * step.weight).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            spread = DTensor.from_local(parameter.grad[None], mesh, [Shard(0)])
            whole = spread.redistribute(mesh, [Replicate()]).to_local()
            parameter.grad.copy_(whole.sum(0))
        optimizer.step()
        optimizer.zero_grad()

    for number in run.steps(STEPS):
        step(number)


@pytest.mark.parametrize(
    ("main", "how"),
    [
        (hsdp, {"mesh": {"replicate": 2, "shard": 2}}),
        pytest.param(tensor_parallel, {"mesh": {"dp": -1, "tp": 2}}, marks=pytest.mark.stories),
        pytest.param(hsdp_averaged, {"mesh": {"replicate": 2, "shard": 2}}, marks=pytest.mark.stories),
        pytest.param(tensor_parallel_averaged, {"mesh": {"dp": -1, "tp": 2}}, marks=pytest.mark.stories),
        (redistribute, {"mesh": {"dp": -1}}),
    ],
    ids=["hsdp", "tensor_parallel", "hsdp_averaged", "tensor_parallel_averaged", "redistribute"],
)
def test_exact_on_a_mesh(main: Script, how: dict[str, Any], train: Train) -> None:
    reference = train(main, ranks=4, batch=(16, 2), **how)
    assert reference.exit_code == 0, reference
    deaths = {rank: moments(reference, rank, main.__name__)[0] for rank in (0, 3)}
    ended = train(main, ranks=4, batch=(16, 2), kill=deaths, **how)
    assert not ended.differences(reference), f"{ended.differences(reference)}\n{deaths}\n{ended}"
    split_over_both = {tensor_parallel, tensor_parallel_averaged}  # every rank holds a part of its own there
    if main not in split_over_both:
        assert not ended.rolled_back, ended


def test_a_replicated_dtensor_parameter_is_a_replica(train: Train) -> None:
    def main(run: Run) -> None:
        model = net().eval()
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), run.mesh, [Replicate()]))
                layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), run.mesh, [Replicate()]))
        optimizer = adam(model, foreach=False)
        run.track(model=model, optimizer=optimizer)

        @run.step
        def step(_: Step) -> None:
            batch = DTensor.from_local(torch.ones(4, WIDTH), run.mesh, [Replicate()])
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference = train(main, ranks=2, mesh={"dp": -1})
    assert reference.exit_code == 0, reference
    ended = train(main, ranks=2, mesh={"dp": -1}, kill={0: moments(reference, 0, "replicated")[0]})
    assert not ended.differences(reference), ended
    assert not ended.rolled_back
