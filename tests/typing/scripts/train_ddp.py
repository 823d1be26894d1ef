"""The script of docs/convert_a_script.md with everything that it leaves out, and what a checker makes of the important names."""

from __future__ import annotations

from io import StringIO
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import rackrun


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@rackrun.elastic(global_batch_size=64, micro_batch_size=8, seed=1234, batch=rackrun.ScaleLR("sqrt", warmup_steps=50))
def main(run: rackrun.Run) -> None:
    model = DDP(nn.Linear(4, 4).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(TensorDataset(torch.randn(640, 4), torch.randn(640, 4)), num_workers=2)

    @run.step
    def train_step(step: rackrun.Step) -> float:
        assert_type(step.shards, tuple[int, ...])
        assert_type(step.attempt, int)
        assert_type(step.samples + step.batch_size, int)
        assert_type(step.weight * step.gradient_scale * step.lr_factor, float)
        assert_type(step.scale(torch.zeros(())), Tensor)
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if int(step) % 10 == 0 and range(100)[step] == 10:
            print(f"{step} {int(step)} {len(data)}")
        assert_type(step.loss, float)
        return step.loss

    def evaluate() -> None:
        run.log(val_loss=loss_of(model, (torch.zeros(4), torch.zeros(4))), note="a text", count=3)

    run.every(100, evaluate)
    run.at_end(evaluate)
    run.on_join(lambda: print(run.rank, run.world_size))
    writer = run.main_only(lambda: StringIO("losses"))
    assert_type(writer, StringIO)
    assert_type(run.mesh, DeviceMesh)
    assert_type(run.device, torch.device)
    assert_type(run.is_main, bool)
    assert_type(run.rank + run.world_size + run.generation + run.global_batch_size, int)

    steps = run.steps(1_000)
    assert_type(len(steps), int)
    for step in steps:
        assert_type(step, int)
        loss = train_step(step)
        assert_type(loss, float)
        run.log(loss=loss)
        if step % 10 == 0 and step < 500:
            print(f"{step:5d} {loss:.3f}", file=writer)
            run.expect(60)


@rackrun.elastic(
    global_batch_size=64, micro_batch_size=8, mesh={"dp": -1, "tp": 2}, reduction="exact", snapshot_every=5
)
def with_arguments(run: rackrun.Run, name: str, *, count: int = 1) -> dict[str, float]:
    @run.step
    def train_step(step: rackrun.Step, scale: float, *, clip: bool = False) -> tuple[float, str]:
        return step.loss * scale, f"{name} {clip}"

    @run.step
    def not_annotated(step: Any) -> Any:
        return step.loss

    losses: dict[str, float] = {}
    for step in run.steps(count):
        if step % 2:
            not_annotated(step)
        else:
            assert_type(train_step(step, 0.5, clip=True), tuple[float, str])
            losses[str(step)] = train_step(step, 1)[0]
    return losses


def refused(run: rackrun.Run) -> None:
    """Each of these is an error: a checker that takes one for right says that the comment on it is not needed."""

    @run.step
    def train_step(step: rackrun.Step, scale: float) -> float:
        return step.loss * scale

    for step in run.steps(10):
        train_step(step)  # type: ignore[call-arg]
        train_step(step, "much")  # type: ignore[arg-type]
        train_step("first", 1.0)  # type: ignore[arg-type]
        step.backward(torch.zeros(()))  # type: ignore[attr-defined]

    @run.step  # type: ignore[arg-type]
    def takes_a_text(step: str) -> None: ...

    run.steps("ten")  # type: ignore[arg-type]
    run.every(10, 10)  # type: ignore[arg-type]
    run.stepps(10)  # type: ignore[attr-defined]
    rackrun.Elastic  # type: ignore[attr-defined]  # noqa: B018 - it is not there
    rackrun.elastic(global_batch_size=8)  # type: ignore[call-arg]
    rackrun.elastic(global_batch_size=8, micro_batch_size=1, reduction="slow")  # type: ignore[arg-type]
    rackrun.ScaleLR("cube")  # type: ignore[arg-type]


if __name__ == "__main__":
    assert_type(main(), None)
    assert_type(with_arguments("a", count=3), dict[str, float])
    with_arguments()  # type: ignore[call-arg]
    try:
        main()
    except rackrun.UsageError as error:
        assert_type(error.remedy, str)
