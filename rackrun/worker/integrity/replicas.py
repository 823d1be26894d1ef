"""Finds out which ranks hold the same state: replicas are checked, not assumed.

A rank's *replica class* is a hash of its parameters' description (names, shapes, shards) and of the content, bit for
bit, of parameters, optimizer state and every other tracked object. It is computed twice: at the start, and right after
the first step, when optimizers have state and two pipeline stages that began alike differ. Ranks of one class can
restore each other. A rank alone in its class has no live copy, so its state is snapshotted. Buffers are compared one by
one: those in which ranks of a class differ (BatchNorm's statistics) are exchanged with every gate
(`rackrun.worker.integrity.unshared_buffers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from rackrun.protocol.commands import Restore
from rackrun.protocol.ids import Position
from rackrun.worker.integrity.unshared_buffers import ROW_BYTES_MAX, UniqueBuffers
from rackrun.worker.process.reports import say
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.tensor_bytes import digests_by_path

if TYPE_CHECKING:
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["ReplicaCheck"]

_ALONE = " alone"


class ReplicaCheck:
    """Decides this rank's replica class, and whether the world needs snapshots."""

    def __init__(self, state: TrackedState, world: WorkerMembership) -> None:
        self._state, self._world = state, world
        self.unique = UniqueBuffers(state, world)
        state.track("rackrun.unique", self.unique)
        self.changed_late = False
        """Whether a buffer of this rank has changed after the gate; the next gate informs the others."""
        self._told = False
        self._shared: tuple[str, tuple[int, ...]] | None = None
        """This rank's class and kin from before its buffers were seen to change after a gate; None if they were not."""
        self._too_large = False
        """In the first unit: whether the buffers that may be a rank's own are too large to be exchanged."""
        self.gates_move = False
        """Whether all gates stand at the end of their steps from the next step on."""
        self.some_are_unique = False
        """Whether some rank's state has no live copy. Then all ranks take snapshots, because all must go back
        together."""

    @property
    def need_snapshots(self) -> bool:
        """Whether snapshots are needed: some rank has no live copy of its state, or this rank is the only one, as the
        others may be lost for now."""
        return self.some_are_unique or self._world.size == 1

    def at_start(self) -> str:
        """Return the class before the first unit. Nothing is committed yet, so equal content means an equal state."""
        return f"start {self._state.layout()} {self._state.content()}"

    def due(self) -> bool:
        """Whether to compare in this unit: the one after the first step since the run began or was resumed. It is the
        same on all ranks, whenever they joined, and when that unit is done again."""
        return self._world.passed == Position(self._world.began.step + 1)

    def begins(self) -> bool:
        """Whether the current unit is the first since the run began or was resumed."""
        return self._world.passed == self._world.began

    def keep_all_buffers(self) -> None:
        """From the next gate on, exchange the buffers of all ranks. Collective over the world.

        Until ranks have been compared, any buffer may differ between them. If the buffers are too large to be
        exchanged, no rank counts as a replica after the first unit.
        """
        buffers = self._state.buffers()
        size = max(row[0] for row in self._gather([sum(buffer.nbytes for buffer in buffers.values())]))
        if not self._world.broken:
            self._too_large = size > ROW_BYTES_MAX
            self.unique.choose(tuple(buffers), 0 if self._too_large else size)

    def known(self, at: Position) -> bool:
        """Whether by the gate of step ``at`` all ranks have been compared, and have reported which buffers change after
        a gate."""
        return at.step > self._world.began.step + 2 and not self.gates_move

    def compare(self) -> bool:
        """Compare all ranks, and set this rank's class and whether some rank is alone in its own. Collective over the
        world. Returns False if the world broke."""
        buffers = self._state.buffers()
        mine = list(digests_by_path(buffers).values())
        layout, content = int(self._state.layout(), 16) % 2**62, self._state.content()
        whole = sum(buffer.nbytes for buffer in buffers.values())
        rows = self._gather([layout, content, len(mine), whole])
        classes, counts = [(row[0], row[1]) for row in rows], [row[2] for row in rows]
        if self._world.broken:
            return False  # the unit, and this comparison, will be repeated
        self.unique.whole_bytes = max(row[3] for row in rows)
        if not self._print_differences(classes):
            return False
        alone = self._world.size > 1 and min(Counter(classes).values()) == 1
        row_bytes = 0
        if max(counts) and max(Counter(classes).values()) > 1:
            everyone = self._gather(mine + [0] * (max(counts) - len(mine)))
            kin = [row for row, other in zip(everyone, classes, strict=True) if other == (layout, content)]
            paths = [path for index, path in enumerate(buffers) if len({row[index] for row in kin}) > 1]
            row_bytes = max(row[0] for row in self._gather([sum(buffers[path].nbytes for path in paths)]))
            if self._world.broken:
                return False
            self.unique.choose(paths, row_bytes if row_bytes <= ROW_BYTES_MAX else 0)
        else:
            self.unique.choose((), 0)
        self._world.replica_class = f"{layout:x} {content:x}{_ALONE if alone else ''}"
        self._equal_ranks(*(rank for rank, other in enumerate(classes) if other == (layout, content)))
        self.some_are_unique = alone
        if self.changed_late:
            self._shared = self._world.replica_class, self._state.lineage.kin
            self._become_unique()
        if row_bytes > ROW_BYTES_MAX:
            self.make_all_unique()
        return True

    def _print_differences(self, classes: Sequence[tuple[int, int]]) -> bool:
        """Print which tracked objects differ among ranks that train the same parameters, and what that costs.
        Collective over the world.

        Such ranks are no replicas. Returns False if the world broke.
        """
        kin = [rank for rank, (layout, _) in enumerate(classes) if layout == classes[self._world.rank][0]]
        if len(set(classes)) == len({layout for layout, _ in classes}):
            return True  # all ranks with the same parameters hold the same state
        named = self._state.content_by_name()
        counts = [row[0] for row in self._gather([len(named)])]
        everyone = self._gather([*named.values(), *[0] * (max(counts) - len(named))])
        if self._world.broken:
            return False
        differing = [name for index, name in enumerate(named) if len({everyone[rank][index] for rank in kin}) > 1]
        if differing and self._world.rank == kin[0] and self._state.others.keys() >= set(differing):
            say(
                f"what {_listed(differing)} holds differs between ranks {_listed(kin)}, though they train the same parameters: none of "
                "them can be restored from another, and a lost rank takes all back to the last snapshot. Remedy: keep what each rank has "
                "of its own (BatchNorm's statistics, or an average of them) in buffers of a tracked nn.Module, which ranks keep for each other."
            )
        return True

    def committed(self, changed_late: float, *, late: bool) -> bool:
        """Update the class after a gate, and return whether this rank's class has changed. ``changed_late``: the gate's
        sum.

        First the class of a rank whose buffers have changed after the gate changes; in the next unit all ranks know of
        it. Where the gate was not at the end of the step (``late``), it is from then on, and the rank is a replica
        again. Otherwise no rank is one.
        """
        fresh = self.unique.committed()
        self.gates_move = False
        if self._too_large:
            self._too_large = False
            self._become_unique()
            return True
        if changed_late and not self._told:
            self.changed_late = False
            size = self.unique.whole_bytes
            self._told = late or size > ROW_BYTES_MAX
            if self._told:
                self.make_all_unique()
                return True
            self.gates_move = True
            self.unique.choose(
                tuple(self._state.buffers()), size
            )  # buffers that change after a gate did not differ when ranks were compared
            return False
        if not fresh and not self.changed_late and not self._told:
            self.changed_late = True
            self._shared = self._shared or (self._world.replica_class, self._state.lineage.kin)
            self._become_unique()
            return True
        if fresh and late and self._shared is not None and self.unique.exchanges and not self._told:
            self._world.replica_class, kin = self._shared
            self._equal_ranks(*kin)
            self._shared = None
            return True
        return False

    def _become_unique(self) -> None:
        self._world.replica_class = (
            f"{self._world.replica_class.removesuffix(_ALONE)} of rank {self._world.rank}{_ALONE}"
        )
        self._equal_ranks(self._world.rank)

    def make_all_unique(self) -> None:
        """Make every rank alone in its class, because one has something that its peers cannot keep. Every rank calls
        this at the same unit."""
        self.unique.choose((), 0)
        self.some_are_unique = True
        self._become_unique()

    def _equal_ranks(self, *ranks: int) -> None:
        self._state.lineage = msgspec.structs.replace(self._state.lineage, kin=ranks)

    def resized(self, origins: Sequence[int | None], restores: Sequence[Restore]) -> None:
        """Adapt to a world with other ranks. ``origins``: each rank's former rank, or None for one that joins now and
        is a replica of its restore sources."""
        known = set(self._state.lineage.kin)
        kin = {rank for rank, origin in enumerate(origins) if origin is not None and origin in known}
        kin |= {int(restore.rank) for restore in restores if kin.intersection(restore.sources)}
        if known:
            self._equal_ranks(*sorted(kin))
        self.unique.resized(origins)

    def adopt(self, manifest: StateManifest) -> None:
        """Take over the class and lineage of a newcomer's source."""
        # the source's manifest replaces what was learned later
        self._told = self.changed_late = self.gates_move = False
        self._shared = None
        self._world.replica_class = manifest.replica_class
        learned = manifest.lineage.changes.union(self._state.lineage.changes)
        self._state.lineage = msgspec.structs.replace(manifest.lineage, changes=learned)
        self._world.began = manifest.lineage.since
        self.some_are_unique = manifest.replica_class.endswith(_ALONE)

    def begin_again(self) -> None:
        """Start anew after the state was filled with other shards: replicas, and which buffers are a rank's own, are
        unknown."""
        self.unique.choose((), 0)
        self._world.replica_class = self.at_start()

    def _gather(self, mine: list[int]) -> list[list[int]]:
        # a host tensor: a break gives a loopback's values there, and no garbage
        row = torch.tensor(mine, dtype=torch.int64)
        return [other.tolist() for other in self._world.groups[0].gather_on_host(row)]


def _listed(names: Sequence[object]) -> str:
    *rest, last = map(str, names)
    return f"{', '.join(rest)} and {last}" if rest else last
