"""A script that breaks a rule is told which, and what to do. None of these trains on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step
from tests.worker.harness import Ended, moments
from tests.worker.scripts import STEPS, Samples, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]


def said(train: Train, main: Callable[[Run], None], **how: Any) -> str:
    ended = train(main, ranks=2, max_restarts=0, **how)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    return ended.failure.message


def looped(body: Callable[[Run, Callable[..., Any], Any], None]) -> Callable[[Run], None]:
    """A script whose loop's body is ``body(run, step function, number)``."""

    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(3):
            body(run, step, number)

    return main


def nothing_tracked(run: Run) -> None:
    next(iter(run.steps(3)))


def step_not_called(run: Run, step: Any, number: int) -> None:
    pass


def step_called_twice(run: Run, step: Any, number: int) -> None:
    step(number)
    step(number)


def optimizer_outside(run: Run, step: Any, number: int) -> None:
    next(iter(run._state.optimizers.values())).step()


def collective_outside(run: Run, step: Any, number: int) -> None:
    step(number)
    dist.all_reduce(torch.ones(1))


def group_after_steps(run: Run, step: Any, number: int) -> None:
    step(number)
    dist.new_group([0, 1])


def loader_outside(run: Run, step: Any, number: int) -> None:
    next(iter(run.loader(Samples())))


def steps_twice(run: Run, step: Any, number: int) -> None:
    next(iter(run.steps(2)))


def two_loops(run: Run) -> None:
    model = net()
    run.track(model=model)
    for _ in run.steps(2):
        raise AssertionError("a step began")
    if run.is_main:
        print("the first is over")
    for _ in run.steps(3):
        pass


def untracked_optimizer(run: Run) -> None:
    model = net()
    run.track(model=model)
    stranger = adam(model)

    @run.step
    def step(_: Step) -> None:
        stranger.step()

    for number in run.steps(2):
        step(number)


def wrong_shapes_by_a_future(run: Run) -> None:
    model = ddp(run)

    def after(_: int) -> None:
        dist.reduce_scatter_tensor(torch.empty(3), torch.zeros(8), async_op=True).get_future().wait()

    fit(run, model, adam(model), after=after)


def in_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="side") as pool:
        return pool.submit(call).result()


def thread_in_a_step(run: Run) -> None:
    model = ddp(run)
    mean = torch.zeros(1)
    fit(run, model, adam(model), after=lambda _: in_a_thread(lambda: dist.all_reduce(mean)))


def thread_between_steps(run: Run, step: Any, number: int) -> None:
    step(number)
    in_a_thread(lambda: dist.all_reduce(torch.zeros(1)))


def too_little_data(run: Run) -> None:
    run.loader(Samples(count=5))


def zero(run: Run) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    model = ddp(run)
    run.track(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))


def gradients_not_cleared(run: Run) -> None:
    model = ddp(run)
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()

    for number in run.steps(3):
        step(number)


def sharded_gradients_not_cleared(run: Run) -> None:
    """Torch 2.15 forgets them itself when FSDP2 is set back: the script would train on as if it had cleared them."""
    model = fully_sharded(net())
    optimizer = adam(model)
    run.track(model=model, optimizer=optimizer)
    data = run.loader(Samples())

    @run.step
    def step(step: Step) -> None:
        for batch in data:
            step.backward(loss_of(model, batch))
        optimizer.step()

    for number in run.steps(3):
        step(number)


def accumulated_over_steps(model: Callable[[Run], Any]) -> Callable[[Run], None]:
    """No optimizer step in every other step: what is in the sum then, nobody could do again."""

    def main(run: Run) -> None:
        wrapped = model(run)
        optimizer = adam(wrapped)
        run.track(model=wrapped, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(wrapped, batch))
            if int(step) % 2:
                optimizer.step()
                optimizer.zero_grad()

        for number in run.steps(4):
            step(number)

    return main


def tracks_late(run: Run, step: Any, number: int) -> None:
    step(number)
    run.track(late=net())


def growing_buffer(run: Run) -> None:
    """Before the ranks have been compared, and by each rank for itself."""
    model: Any = net()
    model.register_buffer("queue", torch.zeros(0, 3))
    wrapped = DDP(model.to(run.device), broadcast_buffers=False)

    def grow(*_: Any) -> None:
        model.queue = torch.cat([model.queue, torch.ones(1, 3)])

    model.register_forward_pre_hook(grow)
    fit(run, wrapped, adam(wrapped))


def exchanges_shard(*, in_optimizer: bool, added: bool = False, after: bool = True) -> Callable[[Run], None]:
    """A module under ``fully_shard`` is given another weight: after the optimizer's step, or between forward and backward."""

    def main(run: Run) -> None:
        model: Any = fully_sharded(net())
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        def exchange() -> None:
            new = torch.nn.Parameter(model[0].weight.detach().clone())
            params = optimizer.param_groups[0]["params"]
            if in_optimizer and added:
                optimizer.add_param_group({"params": [new]})
            elif in_optimizer:
                params[0] = new
            model[0].weight = new

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                loss = loss_of(model, batch)
                if not after and int(step) == 1:
                    exchange()
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if after and int(step) == 1:
                exchange()

        for number in run.steps(4):
            step(number)

    return main


def static_graph(run: Run) -> None:
    model = ddp(run, static_graph=True)
    fit(run, model, adam(model))


def never_in_run_steps(run: Run) -> None:
    run.every(0, lambda: None)


def wrong_shapes(run: Run) -> None:
    """The script's own mistake in a collective is not taken for a lost peer."""
    model = net()
    run.track(model=model)

    @run.step
    def step(_: Step) -> None:
        dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2))

    for number in run.steps(2):
        step(number)


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (nothing_tracked, "nothing is tracked"),
        (looped(step_not_called), "did not call a @run.step function"),
        (looped(step_called_twice), "twice in one turn"),
        (looped(optimizer_outside), "called outside a step"),
        (looped(collective_outside), "outside steps and phases"),
        (looped(group_after_steps), "after run.steps\\(\\) began"),
        (looped(loader_outside), "outside a step function"),
        (looped(steps_twice), "called twice"),
        (two_loops, r"test_misuse\.py:\d+: a second loop over run\.steps\(\).*Remedy: .* if step < a else "),
        (untracked_optimizer, "state that is not tracked"),
        (too_little_data, "fewer than one global batch"),
        (zero, "ZeroRedundancyOptimizer"),
        (gradients_not_cleared, "were not cleared"),
        (sharded_gradients_not_cleared, "were not cleared"),
        (accumulated_over_steps(ddp), "of an older step were not cleared"),
        (accumulated_over_steps(lambda _: fully_sharded(net())), "of an older step were not cleared"),
        (looped(tracks_late), r"run\.track\(late\) was called after run\.steps\(\)"),
        (growing_buffer, "have grown in a step|has another shape"),
        (
            exchanges_shard(in_optimizer=False),
            r"model\.0\.weight was exchanged for another parameter\. fully_shard keeps.*Remedy: .*module\.weight\.copy_",
        ),
        (
            exchanges_shard(in_optimizer=True),
            r"model\.0\.weight was exchanged for another parameter\. fully_shard keeps",
        ),
        (
            exchanges_shard(in_optimizer=True, after=False),
            r"model\.0\.weight was exchanged in a tracked optimizer.*shape \(14, 10\).*fully_shard keeps.*Remedy: .*module\.weight\.copy_",
        ),
        (
            exchanges_shard(in_optimizer=True, added=True, after=False),
            r"a parameter \(shape .*\) that no tracked module has was added.*Remedy: .*to replace a parameter of fully_shard: write",
        ),
        (static_graph, "static_graph=True.*torch's reducer.*one micro-batch"),
        (never_in_run_steps, "would never run"),
        (wrong_shapes_by_a_future, "shape|size"),
        (thread_in_a_step, r"allreduce.*a thread of the script's own \(side_0\)"),
        (looped(thread_between_steps), r"allreduce.*a thread of the script's own \(side_0\)"),
        pytest.param(
            wrong_shapes,
            "invalid tensor size|same dtype|shape",
            marks=pytest.mark.skipif(
                "RACKRUN_NCCL_DOUBLE" in os.environ, reason="only gloo looks at sizes when it is called"
            ),
        ),
    ],
)
def test_a_broken_rule_is_named(main: Callable[[Run], None], words: str, train: Train) -> None:
    message = said(train, main)
    assert re.search(words, message), message


def test_a_phase_may_use_a_thread_that_it_waits_for(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        run.every(2, lambda: in_a_thread(lambda: dist.all_reduce(torch.zeros(1))))
        fit(run, model, adam(model))

    reference = train(main)
    assert reference.exit_code == 0, reference
    ended = train(main, kill={1: moments(reference, 1, "thread")[0]})
    assert not ended.differences(reference), ended


def test_a_static_graph_trains_with_one_micro_batch_for_each_rank(train: Train) -> None:
    reference = train(static_graph, ranks=3, batch=(12, 4))
    ended = train(static_graph, ranks=3, batch=(12, 4), kill={1: moments(reference, 1, "static")[0]})
    assert not ended.differences(reference), ended


def test_an_error_of_the_script_ends_the_run_with_its_own_traceback(train: Train) -> None:
    def fails(run: Run, step: Any, number: int) -> None:
        if number == 1 and run.rank == 1:
            raise ZeroDivisionError("the script's")
        step(number)

    ended = train(looped(fails), ranks=2)
    assert ended.exit_code == 1
    assert ended.failure is not None
    assert "ZeroDivisionError" in ended.failure.traceback


def test_clearing_gradients_at_the_begin_of_a_step_is_as_good(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            model.zero_grad(set_to_none=int(step) % 2 == 0)
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()

        for number in run.steps(STEPS):
            step(number)

    reference = train(main)
    assert reference.exit_code == 0, reference
    ended = train(main, kill={1: moments(reference, 1, "carried")[0]})
    assert not ended.differences(reference), ended


def test_gradients_may_be_cleared_by_hand_where_a_step_does_not_compute_all_of_them(train: Train) -> None:
    def main(run: Run) -> None:
        in_even_steps, always = nn.Linear(2, 2), net()
        model = nn.ModuleList([in_even_steps, always])
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for parameter in model.parameters():
                parameter.grad = None
            for batch in data:
                loss = loss_of(always, batch)
                step.backward(loss if int(step) % 2 else loss + in_even_steps.weight.sum())
            optimizer.step()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main, ranks=1, spares=0)
    assert ended.exit_code == 0, ended


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_drains_at_a_step_boundary(ranks: int, train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        fit(run, model, adam(model))

    ended = train(main, ranks=ranks, drain_at=2)
    assert ended.exit_code == 0, ended
    assert 3 <= len(ended.losses) <= STEPS


def test_a_stop_that_one_rank_alone_has_heard_of_ends_all_after_the_same_step(train: Train) -> None:
    def main(run: Run) -> None:
        def heard(step: int) -> None:
            run._world.drain |= step == 2 and run.rank == 1  # of both, the word has come to this one's process first

        model = ddp(run)
        fit(run, model, adam(model), before=heard)

    ended = train(main, ranks=2)
    assert ended.exit_code == 0, ended
    assert max(ended.losses) == 2, ended
