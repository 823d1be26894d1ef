"""The host's work for a step does not grow with the model: rackrun's own Python is called as often for 40 parameters as for 400.

What is counted is one step that is committed undisturbed, and in which nothing is learned of the script: every call of a function
in rackrun's own files, on the main thread of rank 0; each time that a generator goes on is one.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rackrun
from rackrun.worker.loop.run import Run
from rackrun.worker.state.objects import module_structure
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.scripts import WIDTH, Samples, fully_sharded, loss_of

Train = Callable[..., Ended]
FEW, MANY = 40, 400
COUNTED = 5
"""The sixth step: no power of two, which is when content is looked at."""
OURS = str(Path(rackrun.__file__).parent)
ENDS = "_inner_done"
"""A collective is over: told in whichever thread sees it first."""
WAITS = {"worker_membership.py:may_abandon", "inflight.py:overdue"}
"""Called again for as long as a collective takes."""


class Block(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


class Deep(nn.Module):
    """``count`` parameters in layers, in four blocks; ``norms``: half of them are batch norm's."""

    def __init__(self, count: int, *, norms: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.BatchNorm1d(WIDTH) if norms and n % 2 else nn.Linear(WIDTH, WIDTH) for n in range(count // 2)
        ]
        size = count // 8
        self.blocks = nn.ModuleList(Block(layers[at : at + size]) for at in range(0, count // 2, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class NestedAverage:
    """An average of a script's own: its state has a dictionary for each parameter, with a number in it."""

    def __init__(self, model: nn.Module) -> None:
        self._of, self.held = model, {n: {"mean": p.detach().clone(), "count": 0} for n, p in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self._of.named_parameters():
            held: dict[str, Any] = self.held[name]
            held["mean"].lerp_(parameter.detach(), 0.1)
            held["count"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


class CountsItself(torch.optim.SGD):
    """It keeps a plain number for each parameter, as optimizers of older scripts do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return super().step(closure)


def plain(run: Run, count: int) -> nn.Module:
    return Deep(count)


def replicated(run: Run, count: int) -> nn.Module:
    return DDP(Deep(count))


def with_norms(run: Run, count: int) -> nn.Module:
    return DDP(Deep(count, norms=True))


def half_frozen(run: Run, count: int) -> nn.Module:
    model = Deep(count)
    model.blocks[:2].requires_grad_(False)
    return DDP(model)


def sharded(run: Run, count: int) -> nn.Module:
    model = Deep(count)
    for block in model.blocks:
        fully_shard(block)
    return fully_sharded(model)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def of_many_groups(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [one]} for one in parameters], lr=0.01)


def counting(parameters: Any) -> torch.optim.Optimizer:
    return CountsItself(parameters, lr=0.01)


def script(
    make: Callable[[Run, int], nn.Module],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    extra: str,
    count: int,
    run: Run,
) -> None:
    model = make(run, count)
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", enabled=extra == "scaler")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    extras: dict[str, Any] = {"scaler": scaler, "scheduler": scheduler}
    if extra == "average":
        extras[extra] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
    elif extra == "nested":
        extras[extra] = NestedAverage(model)
    run.track(model=model, optimizer=optimizer, **({extra: extras[extra]} if extra in extras else {}))
    data, calls = run.loader(Samples()), Counter[str]()

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            scaler.scale(step.scale(loss_of(model, batch))).backward()
        if make is plain and run.world_size > 1:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(whole)
            parts = whole.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if extra == "reduced":
            dist.all_reduce(torch.ones(1))  # a number to be shown
        elif extra == "scheduler":
            scheduler.step()
        elif extra == "average":
            extras[extra].update_parameters(model)
        elif extra == "nested":
            extras[extra].update()

    ending: list[Any] = []

    def told(frame: Any, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(OURS) or event not in ("call", "return"):
            return
        if frame.f_code.co_name == ENDS:
            ending.append(frame) if event == "call" else ending.pop()
        elif event == "call" and not ending:
            calls[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1

    for number in run.steps(COUNTED + 2):
        if int(number) == COUNTED and run.is_main:
            sys.setprofile(told)
        step(number)
        sys.setprofile(None)
    if run.is_main:
        say(calls=json.dumps(calls))


def calls_of(train: Train, how: tuple[Any, ...], count: int, ranks: int) -> Counter[str]:
    measured: Callable[..., None] = script
    batch = (4 * ranks, 4)  # one micro-batch a rank
    ended = train(partial(measured, *how, count), ranks=ranks, spares=0, batch=batch, snapshot_every=64)
    assert ended.exit_code == 0, ended
    return Counter({name: times for name, times in json.loads(ended.said[0]["calls"]).items() if name not in WAITS})


def grown(train: Train, how: tuple[Any, ...], ranks: int) -> dict[str, tuple[int, int]]:
    """The functions of ours that were called more or less often when there were more parameters."""
    few, many = (calls_of(train, how, count, ranks) for count in (FEW, MANY))
    assert few.total() > 100, "it was counted"
    return {name: (few[name], many[name]) for name in few | many if few[name] != many[name]}


@pytest.mark.parametrize(
    ("make", "optimizer", "extra", "ranks"),
    [
        (replicated, sgd, "", 2),
        (sharded, adam, "", 2),
        (replicated, sgd, "scaler", 1),
        (replicated, of_many_groups, "", 1),
        *in_stories(
            (plain, sgd, "", 2),
            (replicated, adam, "reduced", 2),
            (replicated, adam, "average", 1),
            (with_norms, adam, "", 2),
            (half_frozen, sgd, "", 1),
            (replicated, counting, "nested", 1),
            names=4,
        ),
    ],
)
def test_calls_of_a_step_do_not_grow_with_the_number_of_parameters(
    make: Any, optimizer: Any, extra: str, ranks: int, train: Train
) -> None:
    assert grown(train, (make, optimizer, extra), ranks) == {}


def test_a_call_for_each_parameter_is_found(monkeypatch: pytest.MonkeyPatch, train: Train) -> None:
    text = (
        "def versions_of_plain(tensors):\n return [one(t) for t in tensors]\ndef one(tensor):\n return tensor._version"
    )
    ours: dict[str, Any] = {}
    exec(compile(text, f"{OURS}/worker/slow.py", "exec"), ours)
    monkeypatch.setattr(module_structure, "versions_of_plain", ours["versions_of_plain"])
    found = grown(train, (replicated, sgd, ""), 1)
    assert found["slow.py:one"][1] == 10 * found["slow.py:one"][0]
    assert found.keys() == {"slow.py:one"}
