"""The gate's sum over a tree: every rank gets the sum of all, nobody gets it before all have entered, and whoever dies wherever, the job
computes the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rackrun.errors import UsageError
from rackrun.worker.communicators.gate_tree import (
    FANOUT,
    GateBlock,
    TreeWork,
    WithGateTree,
    blocks_of,
    fanout,
    with_gate_tree,
)
from rackrun.worker.loop.run import Run
from tests.worker.harness import Ended
from tests.worker.scripts import adam, ddp, fit

Train = Callable[..., Ended]


# -- the tree ----------------------------------------------------------------------------------------------------------
def test_five_ranks_in_pairs_make_three_levels() -> None:
    assert blocks_of(0, 5, 2) == [GateBlock(0, (0, 1)), GateBlock(1, (0, 2)), GateBlock(2, (0, 4))]
    assert blocks_of(1, 5, 2) == [GateBlock(0, (0, 1))]
    assert blocks_of(2, 5, 2) == [GateBlock(0, (2, 3)), GateBlock(1, (0, 2))]
    assert blocks_of(4, 5, 2) == [GateBlock(2, (0, 4))], "it leads nobody in two levels"


def test_a_thousand_ranks_have_two_levels_and_few_connections() -> None:
    blocks = {rank: blocks_of(rank, 1024, FANOUT) for rank in range(1024)}
    assert max(len(found) for found in blocks.values()) == 2
    sockets = {rank: sum(len(block.ranks) - 1 for block in found) for rank, found in blocks.items()}
    assert sockets[0] == 62
    assert sockets[1] == 31
    assert sum(sockets.values()) / 2 == 33 * (32 * 31) / 2  # in place of 523,776


@given(size=st.integers(1, 3000), width=st.integers(2, 40))
def test_every_block_is_known_alike_to_all_of_its_members_and_none_is_too_large(size: int, width: int) -> None:
    known: dict[tuple[int, ...], set[int]] = {}
    for rank in range(size):
        for block in blocks_of(rank, size, width):
            assert 2 <= len(block.ranks) <= width
            assert rank in block.ranks
            known.setdefault((block.level, *block.ranks), set()).add(rank)
    for (_, *members), knowing in known.items():
        assert knowing == set(members)


class _Rank:
    """What one rank does, message by message: the same stages as `TreeWork`'s."""

    def __init__(self, rank: int, size: int, width: int) -> None:
        self.rank, self.blocks = rank, blocks_of(rank, size, width)
        self.stages = [("up", block) for block in self.blocks] + [("down", block) for block in reversed(self.blocks)]
        self.at, self.holds, self.entered, self.alive = 0, 0, False, True

    @property
    def has_total(self) -> bool:
        return self.entered and self.at == len(self.stages)


@given(
    size=st.integers(1, 40), width=st.integers(2, 7), seed=st.integers(0, 2**32), dies=st.floats(0, 0.05), stays=st.booleans()
)  # fmt: skip
def test_whoever_has_the_total_has_the_part_of_everybody(
    size: int, width: int, seed: int, dies: float, stays: bool
) -> None:
    """In any order of events, with deaths at any of them. ``stays``: one rank never enters."""
    order = random.Random(seed)
    ranks = [_Rank(rank, size, width) for rank in range(size)]
    absent = order.randrange(size) if stays else -1
    sent: dict[tuple[str, int, tuple[int, ...], int], int] = {}
    for _ in range(60 * size):
        one = order.choice(ranks)
        if not one.alive or one.rank == absent:
            continue
        if order.random() < dies:
            one.alive = False
            continue
        _goes_on(one, sent)
        for other in ranks:
            assert not other.has_total or other.holds == size
            assert not other.has_total or all(each.entered for each in ranks)
    if not dies and absent < 0:
        assert all(one.has_total for one in ranks)
    if absent >= 0 and size > 1:
        assert not any(one.has_total for one in ranks)


def _goes_on(one: _Rank, sent: dict[tuple[str, int, tuple[int, ...], int], int]) -> None:
    """By one message, if it is there."""
    if not one.entered:
        one.entered, one.holds = True, 1
    if one.at == len(one.stages):
        return
    way, block = one.stages[one.at]
    leads = block.ranks[0] == one.rank
    if way == "up" and leads:
        keys = [("up", block.level, block.ranks, member) for member in block.ranks[1:]]
        if any(key not in sent for key in keys):
            return
        one.holds += sum(sent[key] for key in keys)
    elif way == "up":
        sent["up", block.level, block.ranks, one.rank] = one.holds
    elif leads:
        for member in block.ranks[1:]:
            sent["down", block.level, block.ranks, member] = one.holds
    else:
        key = ("down", block.level, block.ranks, one.rank)
        if key not in sent:
            return
        one.holds = sent[key]
    one.at += 1


# -- when there is one -------------------------------------------------------------------------------------------------
def test_a_world_of_one_block_has_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Any = object()
    assert with_gate_tree(whole, _no_room, 0, FANOUT, timedelta(0)) is whole
    monkeypatch.setenv("RACKRUN_GATE_FANOUT", "4")
    assert with_gate_tree(whole, _no_room, 3, 4, timedelta(0)) is whole


def _no_room(name: str) -> Any:
    raise AssertionError(f"nobody needs {name}")


@pytest.mark.parametrize("text", ["1", "0", "-4", "many", "2.5"])
def test_a_fan_out_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RACKRUN_GATE_FANOUT", text)
    with pytest.raises(UsageError, match="is no fan-out"):
        fanout()


# -- a sum on its way --------------------------------------------------------------------------------------------------
class Stage(dist.Work):
    """Of a group that does as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.error = False, ""

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: Any = None) -> bool:
        if not self.ended:
            raise RuntimeError("not in time")
        if self.error:
            raise RuntimeError(self.error)
        return True


class Group:
    """Two members, of which this is the leader; the other brings 10."""

    def __init__(self) -> None:
        self.begun: list[Stage] = []
        self.gone = False

    def size(self) -> int:
        return 2

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Stage:
        outputs[0][0].copy_(inputs[0])
        outputs[0][1].fill_(10.0)
        return self.broadcast(inputs, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Stage:
        if self.gone:
            raise RuntimeError("socket closed")
        self.begun.append(Stage())
        return self.begun[-1]


LOOK = timedelta(milliseconds=1)


def begun() -> tuple[Group, torch.Tensor, TreeWork]:
    group, values = Group(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    return group, values, TreeWork([(group, 0)], values)


def test_a_look_that_ends_too_early_loses_nothing() -> None:
    group, values, work = begun()
    with pytest.raises(RuntimeError, match="not in time"):
        work.wait(LOOK)
    assert not work.is_completed()
    group.begun[0].ended = True
    with pytest.raises(RuntimeError, match="not in time"):
        work.wait(LOOK)
    assert len(group.begun) == 2, "the next stage"
    assert values.tolist() == [1.0, 2.0], "nothing is known before the last"
    group.begun[1].ended = True
    assert work.wait(LOOK)
    assert work.wait()
    assert values.tolist() == [11.0, 12.0]
    assert work.is_success()


def test_a_stage_that_fails_is_known_to_have_failed_and_stays_so() -> None:
    group, values, work = begun()
    group.begun[0].ended, group.begun[0].error = True, "connection reset"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            work.wait(LOOK)
        assert work.is_completed()
    assert not work.is_success()
    assert values.tolist() == [1.0, 2.0]


def test_a_stage_that_cannot_begin_is_not_skipped() -> None:
    group, values, work = begun()
    group.begun[0].ended, group.gone = True, True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="socket closed"):
            work.wait(LOOK)
        assert work.is_completed()
        group.gone = False
    assert len(group.begun) == 1
    assert not work.is_success()
    assert values.tolist() == [1.0, 2.0]


# -- whole jobs --------------------------------------------------------------------------------------------------------
@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of blocks of two."""
    monkeypatch.setenv("RACKRUN_GATE_FANOUT", "2")


RANKS = 5
STAGES = {0: 6, 2: 4, 3: 2, 4: 2}
"""Rank -> its stages in a tree of pairs: the root, a leader, a member, and one that is a member of the last level alone."""


class Dies:
    """A DDP job in which ``rank`` is killed as its third gate is about to begin ``stage`` (after the last: it has the total, and has not
    told anybody). Who takes over lives."""

    def __init__(self, folder: Path, rank: int = -1, stage: int = -1) -> None:
        self._mark, self._rank, self._stage = folder / f"{rank}-{stage}", rank, stage

    def __call__(self, run: Run) -> None:
        gates = 0
        begin, go_on = TreeWork.__init__, TreeWork._go_on

        def counted(work: TreeWork, *args: Any) -> None:
            nonlocal gates
            gates += 1
            begin(work, *args)

        def strikes(work: TreeWork) -> None:
            if gates == 3 and int(os.environ["RANK"]) == self._rank and work._next == self._stage:
                with contextlib.suppress(FileExistsError):
                    self._mark.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            go_on(work)

        TreeWork.__init__, TreeWork._go_on = counted, strikes  # type: ignore[method-assign,assignment]
        model = ddp(run)
        fit(run, model, adam(model))

    @property
    def struck(self) -> bool:
        return self._mark.exists()


@pytest.mark.usefixtures("pairs")
def test_the_tree_is_what_sums_and_a_job_with_it_is_the_job_without(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summed_by_tree(run: Run) -> None:
        Dies(tmp_path)(run)
        has_tree.append(isinstance(run._world.groups[0].communicator, WithGateTree))
        if not all(has_tree):
            raise AssertionError("there is no tree")

    has_tree: list[bool] = []
    with_tree = train(summed_by_tree, ranks=RANKS, spares=0, batch=(20, 2))
    assert with_tree.exit_code == 0, with_tree
    monkeypatch.delenv("RACKRUN_GATE_FANOUT")
    without = train(Dies(tmp_path), ranks=RANKS, spares=0, batch=(20, 2))
    assert not [line for line in with_tree.differences(without) if not line.startswith("loss of step")]
    assert with_tree.losses == pytest.approx(without.losses, rel=1e-12), "sums in another order"


ALL = [(rank, stage) for rank, stages in STAGES.items() for stage in range(stages + 1)]
USUAL = [(0, 6), (2, 1)]
KILLS = [pytest.param(*one, marks=() if one in USUAL else pytest.mark.stories) for one in ALL]


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(("rank", "stage"), KILLS)
def test_a_rank_that_dies_at_any_stage_changes_no_bit(train: Train, tmp_path: Path, rank: int, stage: int) -> None:
    undisturbed = train(Dies(tmp_path), ranks=RANKS, spares=1, batch=(20, 2))
    struck = Dies(tmp_path, rank, stage)
    disturbed = train(struck, ranks=RANKS, spares=1, batch=(20, 2))
    assert struck.struck, disturbed
    assert len(disturbed.plans) == 1, disturbed
    assert not disturbed.differences(undisturbed), disturbed
