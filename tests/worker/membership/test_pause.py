"""A planned swap, on the workers: all stand still after the same step, and whoever is replaced then takes no step back with it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rackrun.checkpoint.base.errors import MemoryPlanError
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.protocol.commands import BreakGeneration, GenerationPlan
from rackrun.protocol.ids import EVERY, Generation, Incarnation, Position, SlotId
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from tests.worker.harness import Ended, Swap, TinyCluster, say
from tests.worker.scripts import Bodies, Script, adam, ddp, fit, fully_sharded, net

Train = Callable[..., Ended]
Make = Callable[[Run], nn.Module]

STEPS = 9
HOLD, PAUSED_AT = Position(4), Position(5)


def sharded(run: Run) -> nn.Module:
    model = net()
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    return fully_sharded(model)


def script(
    make: Make,
    hold: Position | None = None,
    patch: Callable[[Run], None] = lambda _: None,
    asks: bool = False,
    between: Callable[[Run, int], bool | None] = lambda *_: None,
) -> Script:
    """Trains, with a phase after every second step and one at the end. Before the unit after ``hold`` each rank waits until it
    has been told to pause. ``asks``: and asks then to end the run."""

    def main(run: Run) -> None:
        patch(run)
        world = run._world
        phases: list[tuple[int, float]] = []

        def wait() -> None:
            while hold == world.passed and not world.pausing and run.generation == 1:
                time.sleep(0.001)  # the control thread hears of it, and tells nobody
            world.drain |= asks and world.pausing

        def evaluate() -> None:
            wait()
            total = torch.ones(1)
            dist.all_reduce(total)
            phases.append((run._units.passed.step, total.item()))
            say(phases=phases)

        run.every(2, evaluate)
        run.at_end(evaluate)
        model = make(run)
        fit(run, model, adam(model), steps=STEPS, before=lambda _: wait(), between=lambda step: between(run, step))

    return main


@functools.cache
def undisturbed(make: Make) -> Ended:
    return TinyCluster(script(make), spares=0).run()


def nothing_again(ended: Ended) -> None:
    """Nobody has attempted anything twice, or committed it twice, or gone back."""
    assert all(attempt == 0 for _, _, attempt in ended.told), ended.told
    assert len(ended.told) == len({(rank, at) for rank, at, _ in ended.told})
    assert not ended.rolled_back, ended
    assert not ended.restarted, ended


@pytest.mark.parametrize("make", [ddp, sharded])
def test_a_swap_between_two_steps_repeats_nothing(make: Make, train: Train) -> None:
    ended = train(script(make, HOLD), snapshot_every=100, swap=Swap(HOLD, lost=1))
    assert not ended.differences(undisturbed(make)), ended
    nothing_again(ended)
    (plan,) = ended.plans
    assert plan.committed == PAUSED_AT
    assert [bool(restore.snapshot) for restore in plan.restores] == [make is sharded]
    for said in ended.paused.values():
        assert (said.at, said.activity) == (PAUSED_AT, Activity.WAITING)
        assert said.snapshots == ((5,) if make is sharded else ()), (
            "sealed before it is told, and only where it is of use"
        )
    assert sorted(ended.paused) == [0, 1, 2]
    assert ended.said[0]["phases"] == [[1, 3], [3, 3], [5, 3], [7, 3], [8, 3]]
    assert ended.said[1]["phases"] == [[5, 3], [7, 3], [8, 3]], "the newcomer's"


@pytest.mark.parametrize(("make", "ranks"), [(ddp, 3), pytest.param(sharded, 1, marks=pytest.mark.stories)])
def test_the_code_after_the_call_of_the_step_function_has_run_before_anybody_pauses(
    make: Make, ranks: int, train: Train, tmp_path: Path
) -> None:
    """On who is replaced, too: where a world has one rank, nobody else does it."""
    bodies = Bodies(tmp_path / "bodies")
    lost = ranks // 2
    how = {"ranks": ranks, "snapshot_every": 100, "swap": Swap(HOLD, lost=lost)}
    ended = train(script(make, HOLD, between=bodies.ran), **how)
    assert ended.exit_code == 0, ended
    assert all(attempt == 0 for _, _, attempt in ended.told), ended.told
    before = [f"t/{slot}" for slot in range(ranks)]
    after = sorted(f"t/{ranks if slot == lost else slot}" for slot in range(ranks))
    assert bodies.by_step() == {step: before if step <= PAUSED_AT.step else after for step in range(STEPS)}


def test_told_in_a_phase_all_pause_after_the_next_step_and_may_go_on_without_a_loss(train: Train) -> None:
    ended = train(script(sharded, Position(5)), spares=0, snapshot_every=100, swap=Swap(Position(5)))
    assert not ended.differences(undisturbed(sharded)), ended
    nothing_again(ended)
    assert {said.at for said in ended.paused.values()} == {Position(6)}
    assert [plan.restores for plan in ended.plans] == [()]


def test_nobody_pauses_before_all_know_who_is_whose_replica(train: Train) -> None:
    ended = train(script(ddp, Position(0)), spares=0, swap=Swap(Position(0)))
    assert not ended.differences(undisturbed(ddp)), ended
    nothing_again(ended)
    assert [said.at for said in ended.paused.values()] == [Position(2)] * 3


def test_who_is_lost_before_it_has_paused_is_a_loss_like_any_other(train: Train) -> None:
    """Its snapshot is not sealed when the others have paused: all go back to the one before."""

    def patch(run: Run) -> None:
        copy = HostCopies.copy

        def stuck(self: HostCopies, *args: Any) -> None:
            while run.rank == 1 and run.generation == 1 and run._world.passed == PAUSED_AT:
                time.sleep(1)  # until it is killed
            copy(self, *args)

        HostCopies.copy = stuck  # type: ignore[method-assign,assignment]

    how = {"snapshot_every": 4, "swap": Swap(HOLD, lost=1, answers=2)}
    ended = train(script(sharded, HOLD, patch), **how)
    assert not ended.differences(undisturbed(sharded)), ended
    assert sorted(ended.paused) == [0, 2]
    assert [plan.rollback for plan in ended.plans] == [4]


@pytest.mark.stories
def test_without_memory_for_a_snapshot_a_rank_pauses_all_the_same(train: Train, capfd: Any) -> None:
    def patch(run: Run) -> None:
        begin = Snapshots._begin
        times: list[int] = []

        def short(self: Snapshots, *args: Any) -> Any:
            times.append(1)
            if run.rank == 2 and len(times) == 1:
                raise MemoryPlanError("the test has none.")
            return begin(self, *args)

        Snapshots._begin = short  # type: ignore[method-assign,assignment]

    ended = train(script(sharded, HOLD, patch), spares=0, snapshot_every=100, swap=Swap(HOLD))
    assert not ended.differences(undisturbed(sharded)), ended
    assert {rank: said.snapshots for rank, said in ended.paused.items()} == {0: (5,), 1: (5,), 2: ()}
    assert "rank 2: no snapshot for a planned swap" in capfd.readouterr().err


# -- the end of the run ------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RACKRUN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("RACKRUN_CHECKPOINT_EVERY", "100")
    return tmp_path


def saved(folder: Path) -> list[int]:
    return [info.number for info in DurableStore(folder, "run").checkpoints()]


def slow_storage(run: Run) -> None:
    write = CheckpointWriter.write_shard

    def slow(self: CheckpointWriter, *args: Any, **kwargs: Any) -> bool:
        time.sleep(0.2)
        return write(self, *args, **kwargs)

    CheckpointWriter.write_shard = slow  # type: ignore[method-assign]


def test_after_the_last_step_all_pause_when_its_checkpoint_is_on_disk_and_the_end_follows_the_swap(
    folder: Path, train: Train
) -> None:
    last, hold = Position(STEPS - 1), Position(STEPS - 2, EVERY + 1)
    ended = train(script(ddp, hold, slow_storage), swap=Swap(hold, lost=1))
    assert ended.exit_code == 0, ended
    nothing_again(ended)
    assert {said.at for said in ended.paused.values()} == {last}
    assert list(ended.paused.values())[-1].checkpoints == 1
    assert [plan.committed for plan in ended.plans] == [last]
    assert {rank: said["phases"][-1] for rank, said in ended.said.items()} == {
        rank: [STEPS - 1, 3] for rank in range(3)
    }
    assert saved(folder) == [STEPS - 1]


def test_told_at_the_very_end_nobody_pauses(train: Train) -> None:
    ended = train(script(ddp, Position(8)), spares=0, swap=Swap(Position(8)))
    assert not ended.differences(undisturbed(ddp)), ended
    assert not ended.paused


@pytest.mark.parametrize("make", [ddp, pytest.param(sharded, marks=pytest.mark.stories)])
def test_nobody_pauses_after_the_step_with_which_the_loop_is_left(make: Make, train: Train) -> None:
    def leaves(_: Run, step: int) -> bool:
        return step == PAUSED_AT.step

    ended = train(script(make, HOLD, between=leaves), swap=Swap(HOLD, lost=1))
    assert ended.exit_code == 0, ended
    assert not ended.paused
    assert not ended.plans
    assert max(ended.losses) == PAUSED_AT.step
    assert {rank: said["phases"][-1] for rank, said in ended.said.items()} == {
        rank: [STEPS - 1, 3] for rank in range(3)
    }


def test_a_run_that_ends_does_not_pause(folder: Path, train: Train) -> None:
    """Told of both before one gate. The checkpoint is whole."""
    ended = train(script(ddp, HOLD, slow_storage, asks=True), spares=0, swap=Swap(HOLD))
    assert ended.exit_code == 0, ended
    assert not ended.paused
    assert not ended.plans
    assert max(ended.losses) == 5
    assert saved(folder) == [5]


@pytest.mark.stories
def test_told_to_end_in_a_pause_the_run_ends_a_step_later(folder: Path, train: Train) -> None:
    ended = train(script(sharded, HOLD), swap=Swap(HOLD, lost=1, drain=True))
    assert ended.exit_code == 0, ended
    nothing_again(ended)
    assert max(ended.losses) == 6
    assert saved(folder) == [6]


# -- what is heard -----------------------------------------------------------------------------------------------------
def test_a_pause_is_of_one_generation_and_nobody_else_hears_of_it() -> None:
    fd = HeartbeatPage.create("test")
    page = HeartbeatPage(fd)
    world = WorkerMembership(page, torch.device("cpu"), SlotId("t/0"), Incarnation(1), "")
    world.on_pause(Generation(0))
    assert not world.pausing, "a spare"
    world.machine.start_alone(Generation(3))
    for other in (2, 4):
        world.on_pause(Generation(other))
        assert not world.pausing
    for _ in range(2):
        world.on_pause(Generation(3))
        assert world.pausing
    fourth = GenerationPlan(generation=Generation(4), world_size=1, members=(), store="", layout=Generation(0), full=1)
    world.machine.take_plan(fourth)
    world.machine.join(fourth)
    assert not world.pausing, "forgotten"
    world.on_break(BreakGeneration(generation=Generation(5), workers=(), because=""), lambda: ())
    world.on_pause(Generation(4))
    assert not world.pausing, "between two generations"
    page.close()
    os.close(fd)
