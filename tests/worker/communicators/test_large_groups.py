"""Jobs with groups that are built at their first use: the same bits, whoever is lost before, in and after a build."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.protocol.ids import Position
from rackrun.worker.communicators.gate_tree import WithGateTree
from rackrun.worker.communicators.on_demand import OnDemand
from rackrun.worker.loop.run import Run
from rackrun.worker.membership import communicator_builder
from rackrun.worker.steps.step import Step
from tests.variants import in_stories
from tests.worker.harness import Ended, Swap, moments, say
from tests.worker.scripts import Samples, adam, ddp, fit, loss_of, net

Train = Callable[..., Ended]
RANKS, STEPS, FIRST = 4, 7, 3
"""The world's group is used from step `FIRST` on."""
BATCH = (16, 2)

Use = Callable[[Run], torch.Tensor]
"""Called in a step by all ranks; gives one number each."""


@pytest.fixture(autouse=True)
def _pairs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two ranks are built before a generation begins, larger ones are not."""
    monkeypatch.setenv("RACKRUN_EAGER_RANKS", "2")


def hierarchical(use: Use, first: int = FIRST) -> Callable[[Run], None]:
    """Gradients are added in pairs of ranks, and then in pairs of pairs. What ``use`` gives, added up in the same way, goes into them."""

    def main(run: Run) -> None:
        groups = [[dist.new_group(pair) for pair in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
        inner, outer = groups[0][run.rank // 2], groups[1][run.rank % 2]
        model = net()
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        def add_up(tensor: torch.Tensor) -> None:
            dist.all_reduce(tensor, group=inner)
            dist.all_reduce(tensor, group=outer)

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward(loss_of(model, batch))
            value = use(run) if int(step) >= first else torch.zeros(1)
            add_up(value)
            for parameter in model.parameters():
                assert parameter.grad is not None
                add_up(parameter.grad)
                parameter.grad.mul_(1 + value / 64)
            optimizer.step()
            optimizer.zero_grad()

        for number in run.steps(STEPS):
            step(number)
        world = run._world.groups[0].communicator
        assert isinstance(world, WithGateTree)
        assert isinstance(world._whole, OnDemand)
        say(built=sorted(world._whole._parts))

    return main


# -- what scripts do with the world ------------------------------------------------------------------------------------
def nothing(run: Run) -> torch.Tensor:
    return torch.full((1,), float(run.rank))


def collectives(run: Run) -> torch.Tensor:
    value = torch.full((1,), float(run.rank + 1))
    dist.all_reduce(value)
    rows = [torch.zeros(1) for _ in range(run.world_size)]
    dist.all_gather(rows, value + run.rank)
    return torch.cat(rows).sum().reshape(1)


def one_pair(run: Run) -> torch.Tensor:
    """Ranks 1 and 2 alone; the others compute."""
    value = torch.full((1,), float(run.rank))
    if run.rank == 1:
        dist.send(value + 3, 2)
    elif run.rank == 2:
        dist.recv(value, 1)
    return value


def around_a_collective(run: Run) -> torch.Tensor:
    """A send before it, the receive after it."""
    value, given = torch.full((1,), float(run.rank)), torch.full((1,), 5.0 + run.rank)
    sent = dist.isend(given, 3) if run.rank == 0 else None
    dist.all_reduce(value)
    if run.rank == 3:
        received = torch.zeros(1)
        coming = dist.irecv(received, 0)
        assert coming is not None
        coming.wait()
        value = value + received
    if sent is not None:
        sent.wait()
    return value


def around_a_ring(run: Run) -> torch.Tensor:
    """To the next, from the one before, and across; each rank names them in an order of its own."""
    size, given = run.world_size, torch.full((1,), float(run.rank))
    froms = [torch.zeros(1), torch.zeros(1)]
    operations = [
        dist.P2POp(dist.isend, given, (run.rank + 1) % size),
        dist.P2POp(dist.irecv, froms[0], (run.rank - 1) % size),
        dist.P2POp(dist.isend, given, (run.rank + 2) % size),
        dist.P2POp(dist.irecv, froms[1], (run.rank + 2) % size),
    ]
    for work in dist.batch_isend_irecv(operations[run.rank :] + operations[: run.rank]):
        work.wait()
    return froms[0] * 8 + froms[1]


def objects(run: Run) -> torch.Tensor:
    dist.barrier()
    found: list[Any] = [None] * run.world_size
    dist.all_gather_object(found, {"rank": run.rank})
    told = [sum(one["rank"] for one in found) if run.rank == 1 else None]
    dist.broadcast_object_list(told, 1)
    return torch.full((1,), float(told[0] or 0))


USES = [nothing, collectives, one_pair, around_a_collective, around_a_ring, objects]


@pytest.mark.parametrize(
    "use",
    [use if use is around_a_ring else pytest.param(use, marks=pytest.mark.stories) for use in USES],
)
def test_a_loss_at_any_moment_changes_no_bit(train: Train, use: Use) -> None:
    reference = train(hierarchical(use), ranks=RANKS, spares=2, batch=BATCH)
    assert reference.exit_code == 0, reference
    kill = {rank: moments(reference, rank, use.__name__)[0] for rank in (1, 2)}
    ended = train(hierarchical(use), ranks=RANKS, spares=2, batch=BATCH, kill=kill)
    assert ended.plans, ended
    assert not ended.restarted, ended
    assert not ended.differences(reference), ended


def test_a_recovery_builds_nothing_that_is_as_large_as_the_world(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates, what is asked around a recovery, and the state of the newcomer: over the tree, and between two ranks."""
    monkeypatch.setenv("RACKRUN_CHECK_REPLICAS", "2")
    how = {"ranks": RANKS, "spares": 1, "batch": BATCH}
    reference = train(hierarchical(nothing), **how)
    assert all(said["built"] == [] for said in reference.said.values()), reference.said
    ended = train(hierarchical(nothing), kill={2: moments(reference, 2, 1)[0]}, **how)
    assert len(ended.plans) == 1, ended
    assert not ended.differences(reference), ended
    built = {name for said in ended.said.values() for name in said["built"]}
    assert built, "the newcomer got its state"
    assert all(name.startswith("pair/") and "2" in name for name in built), built


# -- in the middle of a build ------------------------------------------------------------------------------------------
class Dies:
    """A job in which ranks are killed at points of a build of the world's group: each in the first that it comes to, and that
    no other was killed in before it. Who takes over lives."""

    def __init__(self, folder: Path, strikes: dict[int, str] | None = None, use: Use = collectives) -> None:
        self._folder, self._strikes, self._use = folder, strikes or {}, use

    def __call__(self, run: Run) -> None:
        meet, build = communicator_builder._meet, communicator_builder.build_communicator

        def meets(store: Any, rank: int, size: int, timeout: Any) -> None:
            if of_the_world():
                mine = self._may_strike()  # asked once: who dies from here on dies in this build, and not in one before
                if mine == "while the others wait for it":
                    store.wait([f"here/{peer}" for peer in range(size) if peer != rank], timeout)
                if mine in POINTS[:2]:
                    self._strike(mine)
            meet(store, rank, size, timeout)

        def builds(*args: Any) -> Any:
            if of_the_world():
                self._strike("when all have come")
            built = build(*args)
            if of_the_world():
                self._strike("when it is built")
            return built

        communicator_builder._meet, communicator_builder.build_communicator = meets, builds  # type: ignore[assignment]
        hierarchical(self._use)(run)

    @property
    def struck(self) -> bool:
        return all((self._folder / str(rank)).exists() for rank in self._strikes)

    def _may_strike(self) -> str:
        rank = int(os.environ["RANK"])
        order = list(self._strikes)
        if rank not in order or (self._folder / str(rank)).exists():
            return ""
        before = order[: order.index(rank)]
        return self._strikes[rank] if all((self._folder / str(one)).exists() for one in before) else ""

    def _strike(self, point: str) -> None:
        if self._may_strike() == point:
            with contextlib.suppress(FileExistsError):
                (self._folder / os.environ["RANK"]).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


def of_the_world() -> bool:
    return threading.current_thread().name == "rackrun-build-whole"


POINTS = ("before it comes", "while the others wait for it", "when all have come", "when it is built")


@pytest.mark.parametrize("point", [*POINTS[::2], *in_stories(*POINTS[1::2])])
@pytest.mark.parametrize("rank", [2, *in_stories(0)])
def test_a_rank_that_dies_in_a_build_changes_no_bit(train: Train, tmp_path: Path, rank: int, point: str) -> None:
    undisturbed = train(Dies(tmp_path), ranks=RANKS, spares=1, batch=BATCH)
    struck = Dies(tmp_path, {rank: point})
    disturbed = train(struck, ranks=RANKS, spares=1, batch=BATCH)
    assert struck.struck, disturbed
    assert len(disturbed.plans) == 1, disturbed
    assert not disturbed.differences(undisturbed), disturbed


@pytest.mark.parametrize("points", [POINTS[1:3], *in_stories(POINTS[:2], (POINTS[2], POINTS[1]))])
def test_two_that_die_in_one_build_after_another_change_no_bit(
    train: Train, tmp_path: Path, points: tuple[str, str]
) -> None:
    undisturbed = train(Dies(tmp_path), ranks=RANKS, spares=2, batch=BATCH)
    struck = Dies(tmp_path, {1: points[0], 3: points[1]})
    disturbed = train(struck, ranks=RANKS, spares=2, batch=BATCH)
    assert struck.struck, disturbed
    assert len(disturbed.plans) == 2, disturbed
    assert not disturbed.differences(undisturbed), disturbed


def test_a_build_that_fails_is_a_collective_that_fails(train: Train, tmp_path: Path) -> None:
    """Nobody dies: the generation is broken, and the step done again."""

    class Fails(Dies):
        def _strike(self, point: str) -> None:
            if self._may_strike() == point:
                (self._folder / os.environ["RANK"]).touch()
                raise RuntimeError("no route to host")

    undisturbed = train(Fails(tmp_path), ranks=RANKS, spares=0, batch=BATCH)
    failing = Fails(tmp_path, {1: "when all have come"})
    disturbed = train(failing, ranks=RANKS, spares=0, batch=BATCH)
    assert failing.struck, disturbed
    assert any("no route to host" in line for line in disturbed.story), disturbed
    assert not disturbed.differences(undisturbed), disturbed


# -- other answers to a loss -------------------------------------------------------------------------------------------
def whole(run: Run) -> None:
    """DDP over the world."""
    model = ddp(run)
    fit(run, model, adam(model))


def test_a_world_that_shrinks_keeps_its_bits(train: Train) -> None:
    how = {"ranks": RANKS, "spares": 0, "batch": (48, 2), "reduction": "exact"}
    reference = train(whole, **how)
    kill = {1: moments(reference, 1, 0)[0]}
    ended = train(whole, kill=kill, min_ranks=1, policy="swap,shrink,wait", **how)
    assert ended.exit_code == 0, ended
    assert any(plan.world_size < RANKS for plan in ended.plans), ended
    assert ended.losses == reference.losses, ended


def test_a_planned_swap_keeps_its_bits(train: Train) -> None:
    reference = train(whole, ranks=3)
    ended = train(whole, ranks=3, swap=Swap(Position(3), lost=1))
    assert ended.plans, ended
    assert not ended.differences(reference), ended


def test_a_large_group_of_some_ranks_is_built_when_they_use_it(train: Train) -> None:
    def main(run: Run) -> None:
        group = dist.new_group([0, 1, 3])

        def use(run: Run) -> torch.Tensor:
            value = torch.full((1,), float(run.rank))
            if run.rank != 2:
                dist.all_reduce(value, group=group)
            return value

        hierarchical(use)(run)

    reference = train(main, ranks=RANKS, spares=1, batch=BATCH)
    ended = train(main, ranks=RANKS, spares=1, batch=BATCH, kill={3: moments(reference, 3, 2)[0]})
    assert len(ended.plans) == 1, ended
    assert not ended.differences(reference), ended
