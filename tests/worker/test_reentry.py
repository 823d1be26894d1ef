"""The ranks of a sharded world change their number by entering ``main`` again, in the same processes: no step is lost, no bit differs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Ended, TinyCluster, _hash, say
from reshaping import Change, Reshaped, differences
from scripts import Script, adam, fit, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rackrun.core.ids import Position
from rackrun.worker.run import Run

Make = Callable[[Run], nn.Module]
Reshape = Callable[..., tuple[Ended, Reshaped]]
STEPS = 14


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fsdp(run: Run, mesh: Any = None) -> nn.Module:
    model = net()
    for layer in (model[0], model[-1]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(run: Run) -> nn.Module:
    return fsdp(run, run.mesh)


def script(make: Make, *, in_main: Callable[[Run], None] = lambda _: None) -> Script:
    """Trains, with a phase after every fifth step, and says in the end what all ranks hold together."""

    def main(run: Run) -> None:
        in_main(run)
        model = make(run)
        optimizer = adam(model)

        def at_end() -> None:
            state = optimizer.state_dict()["state"]
            held = {path: whole(tensor) for path, tensor in model.named_parameters()}
            held |= {f"{index}/{key}": whole(value) for index, values in state.items() for key, value in values.items()}
            say(whole={path: _hash(t.contiguous().numpy().tobytes()) for path, t in held.items()}, rank=run.rank)

        run.at_end(at_end)
        run.every(5, lambda: None)
        fit(run, model, optimizer, steps=STEPS)

    return main


@functools.cache
def undisturbed(make: Make, ranks: int = 4, mesh: tuple[tuple[str, int], ...] = ()) -> Ended:
    return TinyCluster(
        script(make), ranks=ranks, spares=0, batch=(24, 2), reduction="exact", mesh=dict(mesh) or None
    ).run()


@pytest.fixture
def reshape() -> Iterator[Reshape]:
    clusters: list[Reshaped] = []

    def run(main: Script, *changes: Change, **how: Any) -> tuple[Ended, Reshaped]:
        how = {"ranks": 4, "spares": 0, "batch": (24, 2), "reduction": "exact", **how}
        cluster = Reshaped(main, changes=changes, **how)
        clusters.append(cluster)
        return cluster.run(), cluster

    yield run
    for cluster in clusters:
        cluster.close()


@pytest.mark.parametrize("distant", [False, True])
def test_four_sharded_ranks_become_three_and_four_again(distant: bool, reshape: Reshape) -> None:
    ended, _ = reshape(
        script(fsdp),
        Change((0, 1, 2), told_after=Position(3)),
        Change((0, 1, 2, 4), told_after=Position(7)),
        spares=1,
        snapshot_every=100,
        distant=distant,
    )
    assert not differences(ended, undisturbed(fsdp)), ended
    assert [plan.world_size for plan in ended.plans] == [3, 4]
    first, second = (plan.committed.step for plan in ended.plans)
    assert first < second
