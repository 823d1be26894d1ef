"""How scripts read the loader: ahead of their losses, in a thread, and through generators that go on from step to step."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended
from tests.worker.scripts import STEPS, WIDTH, Samples, adam, ddp, loss_of

Train = Callable[..., Ended]


def as_it_comes(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from loader


def one_ahead(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    ready = next(batches)
    for batch in batches:
        yield ready
        ready = batch
    yield ready


def all_ahead(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter(list(loader))


def counted_ahead(loader: Any) -> Iterator[torch.Tensor]:
    """The loader is not read to its end: it is not known that there is no more."""
    batches = iter(loader)
    return iter([next(batches) for _ in range(len(loader))])


def script(read: Callable[[Any], Iterable[torch.Tensor]]) -> Callable[[Run], None]:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in read(data):
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    return main


AHEAD = [one_ahead, all_ahead, counted_ahead]


@pytest.mark.parametrize("read", AHEAD)
def test_micro_batches_taken_ahead_are_refused_where_a_rank_has_fewer_than_others(
    train: Train, read: Callable[[Any], Iterable[torch.Tensor]]
) -> None:
    """Six micro-batches on four ranks: two ranks repeat one with weight 0, which an earlier one's loss would get."""
    ended = train(script(read), ranks=4, batch=(12, 2), spares=0, max_restarts=0)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    assert "repetition with weight 0" in ended.failure.message, ended


@pytest.mark.parametrize("read", AHEAD)
def test_micro_batches_taken_ahead_are_the_same_after_a_death_where_all_ranks_have_as_many(
    train: Train, read: Callable[[Any], Iterable[torch.Tensor]]
) -> None:
    reference = train(script(read), ranks=2)
    lived = reference.moments[1]
    step_3 = next(at for at, what in enumerate(lived) if what.startswith("committed Position(step=3,"))
    moment = next(at for at in range(step_3, len(lived)) if lived[at].startswith("passed the gate of Position(step=4,"))
    ended = train(script(read), ranks=2, kill={1: moment - 1})
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 1, ended


def test_weights_that_were_read_may_be_passed_on_where_a_rank_has_fewer_micro_batches(train: Train) -> None:
    """The mean over the global batch is the same, whether backward is called in the loop or after it."""

    def main(run: Run, at_once: bool) -> None:
        model = DDP(torch.nn.Linear(WIDTH, WIDTH))
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            taken = []
            for batch in data:
                taken.append((batch, step.weight))
                if at_once:
                    step.backward(loss_of(model, batch))
            for batch, weight in [] if at_once else taken:
                step.backward(loss_of(model, batch), weight=weight)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    at_once, later = (
        train(functools.partial(main, at_once=at), ranks=4, batch=(12, 2), spares=0) for at in (True, False)
    )
    assert (at_once.exit_code, later.exit_code) == (0, 0), later
    assert later.losses == pytest.approx(at_once.losses)


def test_a_rank_with_fewer_micro_batches_may_use_each_of_them_twice(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        first, second = run.loader(Samples()), run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch, other in zip(first, second, strict=True):
                step.backward(loss_of(model, batch))
                step.backward(loss_of(model, other))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=4, batch=(12, 2), spares=0, max_restarts=0)
    assert ended.exit_code == 0, ended


def test_a_thread_that_reads_the_loader_is_refused_though_the_main_thread_waits_for_it(train: Train) -> None:
    def in_thread(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        batches: queue.Queue[torch.Tensor | None] = queue.Queue(2)

        def read() -> None:
            for batch in loader:
                batches.put(batch)
            batches.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := batches.get()) is not None:
            yield batch

    ended = train(script(in_thread), ranks=2, spares=0, max_restarts=0)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    assert "is read by a thread of the script's own" in ended.failure.message, ended


def test_a_generator_of_the_step_may_draw_from_a_kept_one_that_keeps_nothing(train: Train) -> None:
    def kept(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    def some(batches: Iterator[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
        done = 0
        while done < count:
            batch = next(batches)
            done += 1
            yield batch

    def main(run: Run, fault: bool) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())
        batches = kept(data)

        @run.step
        def step(step: Step) -> None:
            for number, batch in enumerate(some(batches, len(data))):
                step.backward(loss_of(model, batch))
                if fault and (int(step), number, run.generation) == (3, 0, 1):
                    if run.rank == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    run._world.wait_broken()
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference, ended = (train(functools.partial(main, fault=fault), ranks=2) for fault in (False, True))
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended
