"""Detects silent corruption: replicas that differ because a GPU or its memory has changed bits on its own.

Every so many steps (``--check-replicas``) all ranks compare digests of their parameters and optimizer state, right
before the update of a step, when its gradients are complete and not applied yet. `rackrun.core.faults.divergence`
decides which rank is wrong, on all ranks alike; they report that to the coordinator, and pass no gate until the
generation is broken.

After an all-reduce all replicas have the same gradients, right or wrong. A wrong gradient of one rank enters all states
and is not detected here. From the step after a corruption, the corrupt rank's gradients have spoilt the other ranks as
well. So all ranks go back to the last step at which all were found equal. A snapshot of it is taken at the end of the
step before each comparison. If the last comparison was in the very step before, no other rank is spoilt yet, and no
rank goes back.

Where fewer than three ranks hold a shard, each keeps the digest of every step. If they differ, all compute the steps
since the last good one again, and the digests of the first time show which of them was wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from rackrun.core.faults.divergence import culprits
from rackrun.protocol.ids import Position, Rank
from rackrun.worker.integrity.replicas import ReplicaCheck
from rackrun.worker.membership.decisions.interruptions import Abandoned
from rackrun.worker.membership.worker_membership import WorkerMembership
from rackrun.worker.process.reports import Reports, say
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["CorruptionCheck"]

_MAJORITY = 3
"""The number of ranks with the same shard from which on one of them can be outvoted."""

_Pass = dict[Rank, dict[int, int]]


class CorruptionCheck:
    """Compares replicas after ``every`` so many steps and soon after each recovery; 0: never. ``distrust``: called with
    the last good step when ranks differ, because what was saved of later steps is of no use."""

    def __init__(
        self,
        every: int,
        state: TrackedState,
        world: WorkerMembership,
        replicas: ReplicaCheck,
        snapshots: Snapshots,
        reports: Reports,
        distrust: Callable[[int], None],
    ) -> None:
        self._every, self._state, self._world, self._replicas = every, state, world, replicas
        self._snapshots, self._reports, self._distrust = snapshots, reports, distrust
        self._last = -1
        """The step before whose update replicas were last found equal."""
        self._seen: dict[int, int] = {}
        """Step -> this rank's digest before its update, for the steps since then."""
        self._before: _Pass = {}
        """All ranks' digests when they differed and it was unclear who was wrong. They count while those steps are
        being computed again."""
        self._until = -1
        self._went_back = False
        self._filled = -1
        """How often this rank's state had been filled from outside when they differed."""
        self._soon = (0, -1)
        """Generation and step of the comparison that follows a recovery."""
        self._told_off = False

    @property
    def on(self) -> bool:
        """Whether comparisons were asked for."""
        return bool(self._every)

    # -- when
    def due(self, step: int, *, last: bool) -> bool:
        """Whether to compare before the update of ``step``: the same on all ranks, whenever they joined. ``last``: the
        run ends with this step."""
        if not self._compares(step):
            return False
        first = step == self._world.began.step + 3
        return last or first or step % self._every == 0 or self._soon == (self._world.generation, step)

    def committed(self, at: Position, *, first_of_generation: bool, last: bool) -> bool:
        """Begin a snapshot of a committed step if the next step compares, and return whether one was begun. ``last``:
        the next step is the run's last."""
        if first_of_generation:  # ranks that have joined cannot go back further
            self._soon = (self._world.generation, at.step + 1)
        if not self.due(at.step + 1, last=last) or not self._may_roll_back():
            return False
        return self._snapshots.take_to_compare(at.step, keep=self._good.step)

    @property
    def _good(self) -> Position:
        """The last committed unit after which all replicas were known to be equal; at the earliest the checkpoint that
        all have read."""
        return Position(self._state.lineage.began) if self._world.good is None else self._world.good

    def _compares(self, step: int) -> bool:
        if not self._every or not self._replicas.known(Position(step)):
            return False
        if self._replicas.some_are_unique and not self._told_off:
            self._told_off = True
            if self._world.rank == 0:
                say("--check-replicas: not every rank has a replica, so nothing is compared")
        return not self._replicas.some_are_unique

    def _may_roll_back(self) -> bool:
        """Whether a rollback, and so a snapshot, may ever be needed."""
        return self._every > 1 or self._no_majority

    @property
    def _no_majority(self) -> bool:
        """Whether this rank has too few replicas for a majority, so that equal ones may still be wrong."""
        return len(self._state.lineage.kin) < _MAJORITY

    # -- compare
    def before_gate(self, at: Position, *, last: bool) -> None:
        """Compare replicas, if that is due. Collective over the world. Raises `Abandoned` when ranks differ."""
        if not self._compares(at.step):
            if self._replicas.some_are_unique:
                self._world.good = None
            return
        self._world.good = min(self._good, self._world.passed)  # all ranks went back, or the run has just begun
        if at.step <= self._last:
            self._last = -1
        # from a rank at the end of the step before
        filled = at.step == self._until and self._state.filled > self._filled
        self._went_back |= at.step < self._until or filled
        if not self._went_back or len(self._before) != self._world.size:
            self._before = {}  # no rollback has followed, or the world has another size
        due = self.due(at.step, last=last)
        if due or self._no_majority:
            self._seen[at.step] = self._state.settled()
        if due:
            self._compare(at)

    def _compare(self, at: Position) -> None:
        digest = self._seen[at.step]
        kind = min(self._state.lineage.kin)
        rows = self._gather([kind, digest, self._good.step, self._good.phase, self._last, bool(self._before)])
        if self._world.broken:
            return  # the gate will not pass
        self._world.good = max(Position(row[2], row[3]) for row in rows)  # a rank that has just joined does not know it
        self._last = max(row[4] for row in rows)
        kinds: dict[int, list[Rank]] = defaultdict(list)
        for rank, row in enumerate(rows):
            kinds[row[0]].append(Rank(rank))
        differ = any(len({rows[rank][1] for rank in kind}) > 1 for kind in kinds.values())
        again = all(row[5] for row in rows)
        if not again:
            self._before = {}
        if differ or again:
            now = self._histories(at.step)
            if not self._world.broken:
                self._judge(at, list(kinds.values()), now, differ=differ)
        if not self._world.broken:
            self._equal(at)

    def _judge(self, at: Position, kinds: Sequence[Sequence[Rank]], now: _Pass, *, differ: bool) -> None:
        """Judge the digests. Returns if all ranks are equal now and the first time convicts none, or the world breaks.

        Otherwise reports the difference and raises `Abandoned`: also if all are equal now, but the digests of the first
        time show which rank was wrong then.
        """
        twice = bool(self._before)
        found = culprits(kinds, [self._first_digests(at.step), now] if twice else [now])
        if found:
            # the wrong gradients are in no rank's state yet
            fresh = not twice and self._world.passed.step == self._last
            good = self._world.passed if fresh or not differ else self._good
            self._before = {}
            self._report_difference(at, found, good)
        if not differ:
            if at.step >= self._until:
                self._before = {}
                if self._world.rank == 0:
                    say(
                        f"replicas differed before step {self._until}; computed again they are equal, and nobody can say which was wrong"
                    )
            return
        if twice and at.step >= self._until:
            alike = [kind for kind in kinds if len({now[rank][at.step] for rank in kind}) == 1]
            differing = tuple(rank for kind in kinds if kind not in alike for rank in kind)
            self._report_difference(at, (), self._good, differing=differing)
        self._before, self._until, self._went_back = now, at.step, False
        self._filled = self._state.filled
        self._gather([at.step])  # a rank that reports now knows that all have kept these digests
        if not self._world.broken:
            self._report_difference(at, (), self._good)

    def _equal(self, at: Position) -> None:
        self._world.good, self._last = self._world.passed, at.step
        self._seen = {step: digest for step, digest in self._seen.items() if step > at.step}

    def _report_difference(
        self, at: Position, found: tuple[Rank, ...], good: Position, differing: tuple[Rank, ...] = ()
    ) -> NoReturn:
        """Report the difference and wait for the break, then raise `Abandoned`. No rank passes the gate, as all have
        drawn the same conclusion."""
        if good < self._world.passed:
            self._distrust(good.step)
        self._reports.differ(at, found, good, differing)
        self._world.wait_broken()
        raise Abandoned

    def _first_digests(self, step: int) -> _Pass:
        """Return the digests of the first time, as far as the repetition has come."""
        return {rank: {s: d for s, d in seen.items() if s <= step} for rank, seen in self._before.items()}

    def _histories(self, step: int) -> _Pass:
        mine = sorted((s, digest) for s, digest in self._seen.items() if self._last < s <= step)
        counts = self._gather([len(mine)])
        room = max(row[0] for row in counts)
        rows = self._gather([value for pair in mine for value in pair] + [-1] * 2 * (room - len(mine)))
        return {
            Rank(rank): {s: d for s, d in zip(row[::2], row[1::2], strict=True) if s >= 0}
            for rank, row in enumerate(rows)
        }

    def _gather(self, mine: list[int]) -> list[list[int]]:
        # a host tensor: a break gives a loopback's values there, and no garbage
        row = torch.tensor(mine, dtype=torch.int64)
        return [other.tolist() for other in self._world.groups[0].gather_on_host(row)]
