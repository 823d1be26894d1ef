"""What of a unit was a rank's own time: all but what it waited in collectives."""

from __future__ import annotations

import torch

from rackrun.worker.device.own_time import OwnTimeMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def backward(*, bucket: float, rest: float, landed: float, clock: Clock, own: OwnTimeMeter, together: int = 1) -> None:
    """One that gives collectives' futures when ``bucket`` seconds of it are computed, computes for ``rest`` more, and then waits until
    they are all done, ``landed`` seconds after that, as DDP's does."""
    leaf = torch.ones(1, requires_grad=True)

    def last_gradient(_gradient: torch.Tensor) -> None:
        clock.now += rest

    def full_bucket(_gradient: torch.Tensor) -> None:
        clock.now += bucket
        for _ in range(together):
            own.future_given()

        def finalize() -> None:  # torch's callback comes after ours
            clock.now += landed
            own.future_completed()

        torch.autograd.Variable._execution_engine.queue_callback(finalize)

    early = leaf * 2
    early.register_hook(last_gradient)
    late = early * 2
    late.register_hook(full_bucket)
    late.sum().backward()


def test_what_is_waited_in_a_collective_is_not_its_own() -> None:
    own = OwnTimeMeter()
    own.begin()
    own.add_host_wait(0.3)
    own.add_host_wait(0.1)
    assert round(own.of(1.0), 9) == 0.6


def test_a_unit_begins_with_nothing_waited() -> None:
    own = OwnTimeMeter()
    own.add_host_wait(0.3)
    own.passes = 2
    own.begin()
    assert (own.of(1.0), own.passes) == (1.0, 0)


def test_the_wait_at_the_end_of_a_backward_pass_is_not_its_own() -> None:
    clock = Clock()
    own = OwnTimeMeter(clock)
    own.begin()
    backward(bucket=0.2, rest=0.3, landed=0.5, clock=clock, own=own, together=3)
    clock.now += 0.1
    assert round(own.of(1.1), 9) == 0.6


def test_a_collective_that_is_done_before_the_last_gradient_was_not_waited_for() -> None:
    clock = Clock()
    own = OwnTimeMeter(clock)
    own.begin()
    leaf = torch.ones(1, requires_grad=True)
    out = leaf * 2

    def full_bucket(_gradient: torch.Tensor) -> None:
        own.future_given()
        own.future_completed()
        clock.now += 0.4  # what is left to compute

    out.register_hook(full_bucket)
    out.sum().backward()
    assert own.of(0.4) == 0.4


def test_each_of_several_backward_passes_has_its_own_wait() -> None:
    clock = Clock()
    own = OwnTimeMeter(clock)
    own.begin()
    for _ in range(3):
        backward(bucket=0.1, rest=0.1, landed=0.2, clock=clock, own=own)
        own.main_thread_resumed()
        clock.now += 0.1
    assert round(own.of(1.5), 9) == 0.9


def test_of_a_unit_in_which_the_world_broke_nothing_is_known() -> None:
    own = OwnTimeMeter()
    own.begin()
    own.invalidate()
    assert own.of(1.0) == 0.0
    own.begin()
    assert own.of(1.0) == 1.0


def test_what_micro_batches_take_is_told_apart_from_the_rest_of_a_step() -> None:
    clock = Clock()
    own = OwnTimeMeter(clock)
    own.begin()
    clock.now += 0.1  # before the first
    for _ in range(2):
        own.begin_microbatch()
        clock.now += 0.2
    own.add_host_wait(0.05)
    clock.now += 0.05
    own.end_microbatches()
    clock.now += 0.3  # the update
    own.end_microbatches()  # the gate of a later optimizer changes nothing
    assert (own.passes, round(own.in_passes, 9), round(own.of(0.85), 9)) == (2, 0.4, 0.8)


def test_the_wait_at_the_end_of_the_last_backward_is_not_its_micro_batchs() -> None:
    clock = Clock()
    own = OwnTimeMeter(clock)
    own.begin()
    own.begin_microbatch()
    backward(bucket=0.2, rest=0.3, landed=0.5, clock=clock, own=own)
    own.end_microbatches()
    assert round(own.in_passes, 9) == 0.5
