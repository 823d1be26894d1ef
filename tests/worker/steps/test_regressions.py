"""Runs that once went wrong, each by its own way: found by reviewers, kept so that they stay right."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.protocol.ids import BEGIN
from rackrun.worker.data.loader import _Workers
from rackrun.worker.loop.run import Run
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from rackrun.worker.steps.undo.unit_undo import UnitUndo
from tests.variants import in_stories
from tests.worker.harness import Ended, say
from tests.worker.scripts import STEPS, Samples, adam, ddp, fit, fully_sharded, loss_of, net

Train = Callable[..., Ended]


def train_with(run: Run, model: nn.Module, after: Callable[[int], None] = lambda _: None, **tracked: Any) -> None:
    fit(run, model, adam(model), average=True, after=after, **tracked)


def moment(ended: Ended, rank: int, said: str, nth: int = 0) -> int:
    """The n-th moment of ``rank``'s life that says this."""
    return [index for index, what in enumerate(ended.moments[rank]) if what.startswith(said)][nth]


# -- going back ----------------------------------------------------------------------------------------------------------
def one_of_its_own(run: Run) -> None:
    """Ranks 0 and 1 are replicas, rank 2 trains other weights."""
    torch.manual_seed(run.rank // 2)
    train_with(run, net())


def test_a_newcomer_is_not_asked_for_steps_from_before_its_time(train: Train) -> None:
    """It took a replica's state without a rollback; the next loss takes everybody back behind that."""
    reference = train(one_of_its_own, snapshot_every=4)
    first = moment(reference, 1, "committed Position(step=5")
    second = moment(reference, 2, "committed Position(step=6") - 1
    ended = train(one_of_its_own, snapshot_every=4, spares=3, kill={1: first, 2: second})
    assert not ended.differences(reference), ended
    assert ended.rolled_back


def test_who_waits_for_a_plan_is_not_on_its_units_time(train: Train) -> None:
    """Somebody else may hold the plan up for longer than a step may take: nobody is to be given up for that who waits."""

    def main(run: Run) -> None:
        world, page, seen = run._runtime.world, run._runtime.page, []
        wait_plan = world.wait_plan

        def looked_at() -> Any:
            if world.generation:
                seen.append((page.activity.name, page.deadline_ms))
            return wait_plan()

        world.wait_plan = looked_at  # type: ignore[method-assign]
        train_with(run, net())
        say(seen=seen)

    ended = train(main, kill={1: "enters a collective after Position(step=3"})
    assert ended.exit_code == 0, ended
    waits = [seen for said in ended.said.values() for seen in said["seen"]]  # one more where the gate itself broke
    assert waits.count(["RECOVERING", 0]) == 2, ended.said
    assert all(deadline_ms == 0 for _, deadline_ms in waits), ended.said


def test_a_stop_that_is_rolled_back_with_its_step_stops_everybody_after_the_same_one(train: Train) -> None:
    """The gate that told of the stop is to be passed again: no newcomer may act on it before."""

    def main(run: Run) -> None:
        def ask(step: int) -> None:
            run._world.drain = run._world.drain or step == 5

        torch.manual_seed(run.rank)
        train_with(run, net(), ask)
        say(left_after=run._units.passed.step)

    reference = train(main, snapshot_every=4)
    ended = train(main, snapshot_every=4, kill={2: moment(reference, 2, "committed Position(step=6")})
    assert ended.exit_code == 0, ended
    assert ended.rolled_back
    assert len({said["left_after"] for said in ended.said.values()}) == 1, ended.said


def test_a_world_of_one_goes_back_to_its_snapshot(train: Train) -> None:
    def main(run: Run) -> None:
        train_with(run, net())

    reference = train(main, ranks=1)
    ended = train(main, ranks=1, kill={0: moment(reference, 0, "committed Position(step=6")})
    assert not ended.differences(reference), ended
    assert ended.rolled_back
    assert not ended.restarted


class Counting(nn.Module):
    """A buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum().detach()
        return x


def test_who_is_a_replica_is_asked_again_after_going_back_to_when_some_were(train: Train) -> None:
    """Ranks 0 and 1 are replicas until a buffer changes after the gate, from step 5 on; rank 2 takes all back to step 4."""

    def main(run: Run) -> None:
        torch.manual_seed(run.rank // 2)
        counting = Counting()

        def count(step: int) -> None:
            if step >= 5:
                counting.seen += run.rank + 1

        train_with(run, net(counting), count)

    reference = train(main, snapshot_every=8)
    first = moment(reference, 2, "committed Position(step=7") - 2
    second = moment(reference, 1, f"committed Position(step={STEPS - 1}")
    ended = train(main, snapshot_every=4, spares=3, kill={2: first, 1: second})
    assert ended.exit_code == 0, ended
    assert ended.losses == reference.losses, ended


class Blocks(nn.Module):
    """Of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(fully_sharded(nn.Linear(10, 10)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_an_evaluation_leaves_no_trace_in_the_next_step_of_a_sharded_model(train: Train) -> None:
    """FSDP prefetches, in backward, for every forward since the last backward, also for those that had none. Survivors that
    have evaluated and a newcomer that has not would gather different blocks at a time: same sizes, so nothing fails."""

    def main(run: Run) -> None:
        model = fully_sharded(Blocks())

        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(2, 10))

        def before(number: int) -> None:
            if not killing or number != 4 or run._units._came_in != BEGIN or run._world.generation != 1:
                return
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with run._world._changed:  # so that the survivors are between two units, and discard nothing
                run._world._changed.wait_for(lambda: run._world.broken)

        run.every(4, evaluate)
        fit(run, model, adam(model), before=before)

    killing = False
    reference = train(main, snapshot_every=2)
    killing = True
    ended = train(main, snapshot_every=2)
    assert not ended.differences(reference), ended
    assert ended.rolled_back


# -- collectives that do not match -----------------------------------------------------------------------------------------
def test_ranks_that_gather_different_blocks_are_told_so(train: Train) -> None:
    """Nothing fails by itself: the sizes are equal, only the values are wrong."""

    def main(run: Run) -> None:
        model = fully_sharded(Blocks())
        blocks: Any = model.blocks
        first, second = blocks[0], blocks[1]
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                if int(step) == 3:
                    for block in (first, second) if run.rank else (second, first):
                        block.unshard()
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    ended = train(main)
    assert ended.exit_code == 1, ended
    assert ended.failure is not None
    assert "did not call the same collectives" in ended.failure.traceback
    assert max(ended.losses) == 2


# -- tensors in another order ------------------------------------------------------------------------------------------------
def channels_last(run: Run) -> nn.Module:
    torch.manual_seed(0)
    convolution: nn.Module = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(nn.Linear(10, 64), nn.Unflatten(1, (64, 1, 1)), convolution, nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("own", [False, True], ids=["from a replica", "from a snapshot"])
@pytest.mark.stories
def test_tensors_that_are_not_row_major_are_restored_as_they_were(own: bool, train: Train) -> None:
    def main(run: Run) -> None:
        model: Any = channels_last(run)
        if own:
            with torch.no_grad():
                model[0].bias.add_(run.rank)
        train_with(run, model)

    reference = train(main, snapshot_every=4)
    ended = train(main, snapshot_every=4, kill={2: moment(reference, 2, "committed Position(step=6")})
    assert not ended.differences(reference), ended
    assert ended.rolled_back == own


def test_a_newcomers_tensor_has_its_sources_strides() -> None:
    def tracked(steps: int) -> TrackedState:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 4, 5, 5)).sum().backward()
            optimizer.step()
        state = TrackedState()
        state.track("model", model)
        state.track("optimizer", optimizer)
        return state

    source, newcomer = tracked(2), tracked(0)
    filled = newcomer.allocate(source.manifest(""))
    for path, tensor in source.tensors().items():
        assert filled[path].stride() == tensor.stride(), path


# -- what a discarded step leaves ----------------------------------------------------------------------------------------------
class Meter:
    def __init__(self) -> None:
        self.total, self.count = torch.zeros(1), 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


def test_tensors_of_other_tracked_objects_are_put_back() -> None:
    state, meter = TrackedState(), Meter()
    state.track("meter", meter)
    undo = UnitUndo(state)
    for change in (lambda: meter.total.add_(1), lambda: setattr(meter, "total", torch.ones(1) * 9)):
        undo.begin()
        change()
        meter.count += 1
        undo.discard(backward_open=True)
        assert (meter.total.item(), meter.count) == (0.0, 0)


def test_a_large_buffer_that_was_restored_is_not_put_back_to_what_it_was_before() -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(400_000))
            self.queue: torch.Tensor

    state, module = TrackedState(), Queue()
    state.track("model", module)
    undo = UnitUndo(state)
    undo.begin()
    manifest = state.manifest("")
    module.queue.numpy()[:] = 5  # as a copy from outside does it: no version is counted up
    state.load_plain(manifest, state.tensors())
    undo.begin()
    module.queue.add_(1)
    undo.discard(backward_open=True)
    assert module.queue[0] == 5


@pytest.mark.parametrize("at", [1, *in_stories(0, 2)])
def test_a_rank_is_lost_in_the_step_in_which_buffers_turn_out_to_be_the_same_on_all(at: int, train: Train) -> None:
    """In the second step ranks are compared, and no longer exchange buffers that are equal. That step may be done again."""

    def main(run: Run) -> None:
        inner = net()
        inner.register_buffer("scale", torch.ones(3))
        model = DDP(inner)
        fit(run, model, adam(model), steps=5)

    reference = train(main)
    last_batch = max(i for i, what in enumerate(reference.moments[1]) if what.endswith(f"of <step {at}, attempt 0>"))
    ended = train(main, kill={1: last_batch})
    assert ended.exit_code == 0, ended
    assert not ended.differences(reference), ended


def test_a_parameter_changed_before_the_update_is_put_back(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            with torch.no_grad():
                next(model.parameters()).mul_(1.125)
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)

    reference = train(main)
    ended = train(main, kill={1: moment(reference, 1, "passed the gate of Position(step=5") - 1})
    assert not ended.differences(reference), ended
    assert not ended.restarted


# -- collectives --------------------------------------------------------------------------------------------------------------
def test_a_set_up_that_broke_is_no_set_up(train: Train) -> None:
    """The last collective before the first step fails between living ranks; its result was not everybody's."""

    def main(run: Run) -> None:
        model = ddp(run)
        communicator = run._world.groups[0].communicator
        if run.rank == 1 and run.generation == 1 and communicator is not None:
            communicator.break_()
        start = torch.full((1,), float(run.rank))
        dist.broadcast(start, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(start)
        train_with(run, model)

    ended = train(main)
    assert ended.exit_code == 0, ended
    assert ended.restarted
    assert len({rank_state["model/param/module.0.weight"] for rank_state in ended.state.values()}) == 1


def test_a_phase_is_never_told_what_was_not(train: Train) -> None:
    """A loopback's sum would be remembered by whoever keeps the best of them."""

    def main(run: Run) -> None:
        model = ddp(run)
        best = [1e9]

        def keep_the_best() -> None:
            loss = torch.full((1,), 10.0 + run.rank - run._units.passed.step / 100)
            dist.all_reduce(loss)
            best[0] = min(best[0], loss.item())

        run.every(1, keep_the_best)
        train_with(run, model)
        say(best=best[0])

    reference = train(main)
    lived = reference.moments[2]
    after = moment(reference, 2, "committed Position(step=4, phase=0")
    dies = next(index for index in range(after, len(lived)) if lived[index].startswith("enters a collective"))
    ended = train(main, kill={2: dies})
    assert not ended.differences(reference), ended
    assert ended.said[0] == reference.said[0]


@pytest.mark.parametrize("swaps_weights", [False, True])
@pytest.mark.stories
def test_a_phase_that_is_left_leaves_the_model_as_it_was(swaps_weights: bool, train: Train) -> None:
    """Training is resumed in its mode, and on its own weights, though the phase was broken in the middle."""

    def main(run: Run) -> None:
        model = ddp(run)

        def evaluate() -> None:
            model.eval()
            own = [parameter.clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters() if swaps_weights else ():
                    parameter.zero_()
                dist.all_reduce(torch.ones(1))
                for parameter, value in zip(model.parameters(), own, strict=True) if swaps_weights else ():
                    parameter.copy_(value)
            model.train()

        run.every(1, evaluate)
        train_with(run, model)

    reference = train(main)
    lived = reference.moments[2]
    after = moment(reference, 2, "committed Position(step=4, phase=0")
    dies = next(index for index in range(after, len(lived)) if lived[index].startswith("enters a collective"))
    ended = train(main, kill={2: dies})
    assert not ended.differences(reference), ended
    assert not ended.restarted


def test_a_buffer_that_one_rank_changes_after_the_gate_keeps_collectives_in_step(train: Train) -> None:
    def main(run: Run) -> None:
        model = ddp(run, nn.BatchNorm1d(14), broadcast_buffers=False)

        def look(step: int) -> None:
            if run.is_main and step == 3:
                model.module(torch.ones(4, 10) * 3)

        train_with(run, model, look)

    reference = train(main)
    assert reference.exit_code == 0, reference
    assert not reference.plans, "no fault, and yet a recovery"
    for step in (3, 4, 6):
        ended = train(main, kill={0: moment(reference, 0, f"committed Position(step={step}")})
        assert not ended.differences(reference), ended


@pytest.mark.stories
def test_a_loss_that_is_reduced_to_be_shown_costs_a_sharded_world_nothing(train: Train) -> None:
    def main(run: Run) -> None:
        model = net()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.ones(1))

        for number in run.steps(STEPS):
            step(number)

    reference = train(main, ranks=4)
    ended = train(main, ranks=4, kill={1: moment(reference, 1, "passed the gate of Position(step=5") + 1})
    assert not ended.differences(reference), ended
    assert not ended.restarted


# -- data -----------------------------------------------------------------------------------------------------------------------
def test_prefetching_goes_on_after_a_jump_and_after_a_step_that_left_batches_unread() -> None:
    class Fetch:
        drawn = "", None

        def __call__(self, step: int, ids: Any) -> tuple[int, int]:
            return step, int(ids)

    workers = _Workers(Fetch(), 1, 2)  # type: ignore[arg-type]

    def upcoming(step: int, shard: int) -> Any:
        at = ((s, i) for s in itertools.count(step) for i in range(2))
        return ((key, key[1]) for key in at if key > (step, shard))

    def take(step: int, shard: int) -> Any:
        return workers.take((step, shard), shard, upcoming(step, shard))  # type: ignore[arg-type]

    assert [take(0, 0), take(0, 1)] == [(0, 0), (0, 1)]
    assert take(7, 0) == (7, 0), "a promoted spare"
    stream = workers._stream
    assert take(8, 0) == (8, 0), "(7, 1) was left unread"
    assert take(8, 0) == (8, 0), "done again"
    assert take(8, 1) == (8, 1)
    assert workers._stream is stream
    workers._stream = None
    del stream
    gc.collect()  # DataLoader's iterator is in a cycle, and has processes


# -- between the ledger and the gate -------------------------------------------------------------------------------------
def test_a_rank_is_lost_while_it_waits_for_its_device(train: Train) -> None:
    """It has written down its samples of the step, and not entered the gate: they count once, by who takes over."""

    def main(run: Run) -> None:
        come = run._world.synchronise_device

        def dies() -> None:
            unit = run._units.step_in_hand
            if killing and run.rank == 1 and run._world.generation == 1 and unit is not None and unit._at.step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            come()

        run._world.synchronise_device = dies  # type: ignore[method-assign]
        model = ddp(run)
        fit(run, model, adam(model))

    killing = False
    reference = train(main)
    killing = True
    ended = train(main)
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 1, ended
    assert all(count == reference.counts[at] for at, count in ended.counts.items()), ended
