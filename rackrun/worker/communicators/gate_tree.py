"""Sums the gate over many ranks: up a tree of small groups of hosts, and down again.

gloo's all-reduce is a ring, so a sum over *n* ranks takes 2 (n - 1) messages one after another. Here ranks are cut into
blocks of `FANOUT` by their numbers. The first of each block is its leader, and leaders are cut into blocks again. On
the way up a leader gathers and adds the values of its block. Rank 0 has the total, and on the way down each leader
broadcasts it to its block.

The meaning of the gate stays the same: the total holds what every rank has offered, and a rank offers its part when it
enters. So a rank that has the total knows that all have entered, whatever happens to the others and their connections
meanwhile.

Values are added in the order of ranks. The sum is the same on all ranks and in every run, because it is computed once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rackrun.errors import UsageError
from rackrun.worker.communicators.communicator import Communicator, PointToPoint
from rackrun.worker.communicators.gloo import GlooCommunicator
from rackrun.worker.communicators.on_demand import OnDemand

__all__ = [
    "FANOUT",
    "GATE_MAX",
    "GATE_SUM",
    "GateBlock",
    "TreeSum",
    "TreeWork",
    "WithGateTree",
    "blocks_of",
    "fanout",
    "on_hosts",
    "with_gate_tree",
]

FANOUT = 32
"""Members of a block. A larger value gives a leader more connections and the tree fewer levels: 32 serve 1,024 ranks
with two levels."""
_VARIABLE = "RACKRUN_GATE_FANOUT"
GATE_SUM, GATE_MAX = "gate_sum", "gate_max"
"""Names of the collectives of a communicator with a tree (see `on_hosts`)."""


@dataclass(frozen=True)
class GateBlock:
    """One group of the tree with a given rank as a member."""

    level: int
    """0 for blocks of ranks, 1 for blocks of their leaders, and so on."""
    ranks: tuple[int, ...]
    """The members' ranks, the leader first."""


def blocks_of(rank: int, size: int, width: int) -> list[GateBlock]:
    """Return the blocks of ``rank`` from the lowest level up. It leads all of them, except perhaps the last. Blocks of
    one rank have nothing to do and are left out."""
    found: list[GateBlock] = []
    stride = 1
    level = 0
    while stride < size and rank % stride == 0:
        leader = rank - rank % (stride * width)
        members = tuple(range(leader, min(leader + stride * width, size), stride))
        if len(members) > 1:
            found.append(GateBlock(level, members))
        if leader != rank:
            break
        stride *= width
        level += 1
    return found


def fanout() -> int:
    """Return `FANOUT` or the value from the environment (for tests, so that small worlds have a tree). It must be the
    same on all ranks. Raises `UsageError` for an invalid value."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return FANOUT
    if not text.isdecimal() or int(text) < 2:
        raise UsageError(f"{_VARIABLE}={text} is no fan-out.", remedy="give a number from 2, the same on all hosts.")
    return int(text)


class TreeSum:
    """The blocks of one rank in one generation."""

    def __init__(self, rank: int, groups: Sequence[tuple[GateBlock, GlooCommunicator]]) -> None:
        """``groups``: in the order of `blocks_of`."""
        self._groups = [(communicator.inner, block.ranks.index(rank)) for block, communicator in groups]
        self._communicators = [communicator for _, communicator in groups]

    @classmethod
    def build(cls, room: Callable[[str], dist.Store], rank: int, size: int, width: int, timeout: timedelta) -> TreeSum:
        """Connect this rank's blocks, and return when all their members have joined; raises `RuntimeError` after
        ``timeout``. ``room(name)`` returns a store that is the same for all who ask for this name."""
        groups = [
            (block, GlooCommunicator(room(f"{block.level}/{block.ranks[0]}"), block.ranks.index(rank), len(block.ranks), timeout))
            for block in blocks_of(rank, size, width)
        ]  # fmt: skip
        return cls(rank, groups)

    def sum(self, values: torch.Tensor) -> TreeWork:
        """Replace ``values`` (1-d, on the host) by the sum over all ranks, once the returned work is done."""
        return TreeWork(self._groups, values)

    def largest(self, values: torch.Tensor) -> TreeWork:
        """Replace ``values`` by the element-wise maximum over all ranks, like `sum`."""
        return TreeWork(self._groups, values, torch.maximum)

    def break_(self) -> None:
        for communicator in self._communicators:
            communicator.break_()


class TreeWork(dist.Work):
    """A sum in progress. One stage is in flight at a time; the next begins inside `wait`, so somebody must wait.

    A stage that fails ends it: `wait` raises gloo's error, and ``values`` are unchanged.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Any, int]],
        values: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
    ) -> None:
        super().__init__()
        self._values, self._sum, self._add_one = values, values.clone(), add
        self._stages: list[Callable[[], dist.Work]] = []
        self._gathered: list[torch.Tensor] = []
        for group, place in groups:
            self._stages.append(partial(self._gather, group, place))
        for group, _ in reversed(groups):
            self._stages.append(partial(self._broadcast, group))
        self._next = 0
        self._current: dist.Work | None = None
        self._error: RuntimeError | None = None
        self._go_on()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all stages. ``timeout`` limits each stage. Raises `RuntimeError` when a stage fails, or has not
        ended in time; in that case the work may be waited for again."""
        if self._error is not None:
            raise self._error
        while self._current is not None:
            ended = self._current.is_completed()  # read first: it may end just after the wait has timed out
            try:
                self._current.wait() if timeout is None else self._current.wait(timeout)
            except RuntimeError as error:
                if ended:
                    self._error = error
                raise
            self._go_on()
        return True

    def is_completed(self) -> bool:
        """Whether nothing is left to wait for: the sum is complete, or a stage is known to have failed."""
        return self._current is None or self._error is not None

    def is_success(self) -> bool:
        """Return whether the sum has ended without an error."""
        return self._current is None and self._error is None

    def _go_on(self) -> None:
        """Begin the next stage after the one in flight has ended without an error."""
        self._add()
        if self._next == len(self._stages):
            self._current = None
            self._values.copy_(self._sum)
            return
        begin = self._stages[self._next]
        self._next += 1
        try:
            self._current = begin()
        except RuntimeError as error:  # its connections are gone already
            self._error = error
            raise

    def _gather(self, group: Any, place: int) -> dist.Work:
        options = dist.GatherOptions()
        options.rootRank = 0
        if place:
            return group.gather([], [self._sum], options)  # type: ignore[no-any-return]
        self._gathered = [torch.empty_like(self._sum) for _ in range(group.size())]
        return group.gather([self._gathered], [self._sum], options)  # type: ignore[no-any-return]

    def _add(self) -> None:
        """On a leader, add up what its block has offered, itself included, in the order of ranks."""
        if self._gathered:
            total = self._gathered[0]
            for part in self._gathered[1:]:
                total = self._add_one(total, part)
            self._sum, self._gathered = total, []

    def _broadcast(self, group: Any) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return group.broadcast([self._sum], options)  # type: ignore[no-any-return]


class WithGateTree:
    """A communicator whose gate uses a tree. A break ends the tree first (see `rackrun.worker.communicators.nccl`)."""

    def __init__(self, whole: Communicator, tree: TreeSum) -> None:
        self._whole, self._tree = whole, tree

    @property
    def batches(self) -> bool:
        return self._whole.batches

    def call(self, name: str, *args: Any, on_host: bool = False) -> Any:
        """Start a collective. `GATE_SUM` and `GATE_MAX` take one list of one tensor, and always run on the hosts."""
        if name == GATE_SUM:
            return self._tree.sum(args[0][0])
        if name == GATE_MAX:
            return self._tree.largest(args[0][0])
        return self._whole.call(name, *args, on_host=on_host)

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        return self._whole.batch(operations)

    def is_over(self, work: dist.Work) -> bool:
        return self._whole.is_over(work)

    def lost_a_peer(self) -> bool:
        return self._whole.lost_a_peer()

    def break_(self) -> None:
        self._tree.break_()
        self._whole.break_()

    def drop(self) -> None:
        self._whole.drop()


def with_gate_tree(
    whole: Communicator, room: Callable[[str], dist.Store], rank: int, size: int, timeout: timedelta
) -> Communicator:
    """Return ``whole`` with a tree beside it if the world is larger than a block, or if ``whole`` is built on demand
    and should not be needed; otherwise ``whole``. May block, as building does."""
    width = fanout()
    if size <= width and not isinstance(whole, OnDemand):
        return whole
    return WithGateTree(whole, TreeSum.build(room, rank, size, width, timeout))


def on_hosts(communicator: Communicator | None, *, largest: bool = False) -> str:
    """Return the name of the collective that sums values of all hosts, or with ``largest`` takes their maximum: the
    tree's, where there is one."""
    if not isinstance(communicator, WithGateTree):
        return "allreduce"
    return GATE_MAX if largest else GATE_SUM
