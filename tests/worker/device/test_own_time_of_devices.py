"""A rank's own time on a device: between places in its stream, read when the device is there, and never awaited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.worker.device.device_queue import StreamEvent
from rackrun.worker.device.own_time import OwnTimeMeter
from rackrun.worker.loop.run import Run
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.nccl_double import MODES
from tests.worker.scripts import adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]


class Place:
    def __init__(self) -> None:
        self.at_s: float | None = None

    def passed(self) -> bool:
        return self.at_s is not None

    def since(self, earlier: StreamEvent) -> float:
        assert isinstance(earlier, Place)
        assert self.at_s is not None, "asked before the device was there"
        assert earlier.at_s is not None
        return self.at_s - earlier.at_s


class Device:
    """Comes as far as a test says. Its host is always ahead."""

    is_host = False
    name = "device of a test"

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.current = 1

    def mark(self) -> Callable[[], bool]:
        return self.record_event().passed

    def record_event(self) -> Place:
        self.places.append(Place())
        return self.places[-1]

    def stream(self) -> int:
        return self.current

    def is_capturing(self) -> bool:
        return False

    def place(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def use(self) -> None:
        pass

    def synchronise(self) -> None:
        pass

    def come(self, *at_s: float) -> None:
        """Past the oldest places that it has not passed, at these times."""
        ahead = [place for place in self.places if not place.passed()]
        for place, at in zip(ahead, at_s, strict=False):
            place.at_s = at


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def own(device: Device) -> OwnTimeMeter:
    found = OwnTimeMeter(lambda: 0.0, device)  # the host's clock says nothing
    found.begin()
    return found


def waits(own: OwnTimeMeter, device: Device) -> None:
    own.add_stream_wait(device.record_event(), device.record_event())


def test_what_the_stream_stood_is_not_its_own(own: OwnTimeMeter, device: Device) -> None:
    waits(own, device)
    waits(own, device)
    device.come(10.0, 10.25, 11.0, 11.5)
    assert own.of(2.0) == 1.25


def test_a_wait_behind_the_gate_counts_for_the_next_unit_and_once(own: OwnTimeMeter, device: Device) -> None:
    waits(own, device)
    device.come(10.0, 10.5)
    waits(own, device)
    assert own.of(2.0) == 1.5
    own.begin()
    device.come(12.0, 12.25)
    assert own.of(2.0) == 1.75
    own.begin()
    assert own.of(2.0) == 2.0


def test_what_another_stream_waits_for_holds_up_nothing_that_is_computed(own: OwnTimeMeter, device: Device) -> None:
    device.current = 2
    waits(own, device)
    device.come(10.0, 10.5)
    assert own.of(2.0) == 2.0


def test_what_a_broken_unit_waited_for_is_forgotten(own: OwnTimeMeter, device: Device) -> None:
    waits(own, device)
    own.invalidate()
    assert own.of(2.0) == 0.0
    own.begin()
    device.come(10.0, 11.5)
    assert own.of(2.0) == 2.0


def test_micro_batches_take_what_the_device_took_for_them(own: OwnTimeMeter, device: Device) -> None:
    for _ in range(2):
        own.begin_microbatch()  # one place, before the first
    waits(own, device)
    own.end_microbatches()
    waits(own, device)
    device.come(10.0, 10.5, 10.75, 12.0, 12.5, 12.75)
    assert own.of(4.0) == 3.5
    assert (own.passes, own.in_passes) == (2, 1.75)


def test_the_end_of_a_backward_pass_is_bounded_before_and_after_all_that_waits_in_it(
    own: OwnTimeMeter, device: Device
) -> None:
    leaf = torch.ones(1, requires_grad=True)
    order: list[str] = []

    def full_bucket(_gradient: torch.Tensor) -> None:
        own.future_given()
        own.future_given()  # of a second bucket
        torch.autograd.Variable._execution_engine.queue_callback(lambda: order.append(f"{len(device.places)} places"))

    out = leaf * 2
    out.register_hook(full_bucket)
    out.sum().backward()
    assert order == ["1 places"], "DDP waits for its buckets in a callback that comes after ours"
    assert len(device.places) == 2
    device.come(10.0, 10.5)
    assert own.of(2.0) == 1.5


# -- whole jobs: some ranks have entered a collective for certain, and then the slow one takes its time


_SLOW_S = 0.3


def measured(run: Run) -> list[tuple[float, float]]:
    """Of each unit of this rank: what it took, and its own part."""
    found: list[tuple[float, float]] = []
    of = OwnTimeMeter.of

    def kept(own: OwnTimeMeter, seconds: float) -> float:
        found.append((seconds, of(own, seconds)))
        say(times=found)
        return found[-1][1]

    OwnTimeMeter.of = kept  # type: ignore[method-assign,assignment]
    return found


def stand(entered: Path, run: Run) -> None:
    """The slow rank: until the others have entered, and then for as long as a slow rank takes."""
    while len(list(entered.iterdir())) < run.world_size - 1:
        time.sleep(0.001)
    time.sleep(_SLOW_S)


def check(ended: Ended, slow: int) -> None:
    assert ended.exit_code == 0, ended
    for rank, said in ended.said.items():
        took = [(seconds, own) for seconds, own in said["times"] if seconds >= _SLOW_S]
        assert took, "a step as long as the slow rank made it"
        if rank == slow:
            assert max(own for _, own in took) >= _SLOW_S
        else:
            assert max(seconds - own for seconds, own in took) >= _SLOW_S


@pytest.mark.parametrize("mode", MODES)
def test_who_waits_in_a_synchronous_collective_is_not_slow(
    mode: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run) -> None:
        measured(run)
        model = net().to(run.device)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)

        @run.step
        def step(step: Any) -> None:
            step.backward(loss_of(model, torch.ones(2, 10)))
            if int(step) == 2 and run.rank == 1:
                stand(tmp_path, run)
            world = run._world
            record_event = world.queue.record_event

            def shown() -> Any:
                place = record_event()
                (tmp_path / str(run.rank)).touch()
                return place

            if int(step) == 2:
                world.queue.record_event = shown  # type: ignore[method-assign]
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            world.queue.record_event = record_event  # type: ignore[method-assign]
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(4):
            step(number)

    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    check(train(main, spares=0), slow=1)


@pytest.mark.parametrize("mode", [MODES[0], *in_stories(*MODES[1:])])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_who_waits_at_the_end_of_ddps_backward_is_not_slow(
    reduction: str, mode: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a hook of DDP computes with what was reduced, in a callback of a collective's future: in a stream beside."""

    def main(run: Run) -> None:
        measured(run)
        computed = OwnTimeMeter._backward_computed

        def shown(own: OwnTimeMeter) -> None:
            computed(own)
            if run._world.passed.step == 1:
                (tmp_path / str(run.rank)).touch()

        OwnTimeMeter._backward_computed = shown  # type: ignore[method-assign,assignment]
        model = ddp(run)

        def slow(step: int) -> None:
            if step == 2 and run.rank == 1:
                model.module[0].weight.register_hook(lambda _: stand(tmp_path, run))

        fit(run, model, adam(model), steps=4, before=slow)

    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    check(train(main, spares=0, reduction=reduction), slow=1)
