"""Shrinking and growing of the world: which ranks go on with which numbers, and when this is possible.

*Shrink*: ranks are lost and no spare takes them over; the others go on without them. *Grow*: workers wait, and the
world has fewer ranks than it began with. The global batch stays the same, and its micro-batches are divided anew. If
every rank is a whole replica of every other (DDP), only the ranks' numbers change. Otherwise all enter ``main`` again
and shard their state anew (`rackrun.core.generation.old_world`); then whole positions along the data axis of the mesh
are removed or added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rackrun.core.generation.old_world import OldWorld
from rackrun.core.generation.restore_sources import RestoreSources
from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.core.placement import mesh_resize
from rackrun.core.placement.mesh_resize import Axes
from rackrun.core.placement.seating import Seating
from rackrun.core.resize.growth_backoff import GrowthBackoff
from rackrun.protocol.ids import Position, Rank, steps_in
from rackrun.protocol.job_config import JobConfig
from rackrun.topology.model.mesh import Mesh

__all__ = ["Resizing", "renumbered"]


def renumbered(staying: Collection[Rank]) -> dict[Rank, Rank]:
    """Return new numbers (old rank -> new rank, ``0`` to ``len(staying) - 1``). A rank keeps its number if possible;
    the last ranks fill the gaps."""
    size, staying = len(staying), dict.fromkeys(staying)
    gaps = iter(rank for rank in range(size) if rank not in staying)
    return {rank: rank if rank < size else Rank(next(gaps)) for rank in sorted(staying)}


@dataclass(slots=True)
class Resizing:
    """Changes the size of the world while all members are parked."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    sources: RestoreSources
    classes: dict[Rank, str]
    growth: GrowthBackoff

    # -- shrink ----------------------------------------------------------------------------------------------------
    def why_not_shrink(self, committed: Position, gate: tuple[float, ...], leaving: Collection[Rank] = ()) -> str:
        """Return why the world cannot go on without the lost ranks and those in ``leaving``; "": it can. All members
        have parked."""
        if not self.config.min_ranks:
            return "the number of ranks is fixed (--min-ranks 0)"
        members, trusted = self.world.members, self.world.trusted
        if trusted is not None and trusted < committed:
            return "all have to go back first, to a state that is known to be good"
        staying = self.staying(leaving)
        if len(staying) < max(self.config.min_ranks, 1):
            return f"{len(staying)} ranks would be left, of {self.config.min_ranks} at the least (--min-ranks)"
        if fixed := next((record.fixed for record in members.values() if record.fixed), ""):
            return fixed
        if self._reenters(members.values()):
            old = self.world.old or self._as_it_was(committed, gate)
            going = [record.worker for rank, record in members.items() if rank not in staying]
            return "no copy of some state is left in memory" if old.state(members, self.rack, going) is None else ""
        clean = any(self._can_go_on(record, committed) for rank, record in members.items() if rank in staying)
        return (
            self._unlike(members)
            if clean and not self.world.rollback_incomplete()
            else "nobody has the state of the last step"
        )

    def staying(self, leaving: Collection[Rank] = ()) -> dict[Rank, Rank]:
        """Return the ranks that would go on without the lost ones and those in ``leaving``: old -> new."""
        return self._smaller(leaving)[1]

    def bound_to(self, ranks: Collection[Rank]) -> list[Rank]:
        """Return these ranks and those that would have to go with them, living or not."""
        axes = self._axes()
        at = mesh_resize.data_axis(axes)
        if not ranks or not self._reenters(self.world.members.values()) or at is None:
            return sorted(dict.fromkeys(ranks))
        staying = mesh_resize.without(axes, at, mesh_resize.places(axes, at, ranks))[1]
        return [rank for rank in self.world.ranks() if rank not in staying]

    def replica(self) -> int:
        """Return how many ranks are removed or added together; 0: the size cannot change."""
        axes = self._axes()
        if not self._reenters(self.world.members.values()):
            return 1
        at = mesh_resize.data_axis(axes)
        return 0 if at is None else self.world.size // axes[at][1]

    def surplus(self, to: int) -> list[Rank]:
        """Return the ranks to remove so that ``to`` ranks stay: those on slots to avoid first, then the last ones."""
        world, replica = self.world, self.replica()
        if to >= world.size or not replica:
            return []
        axes = self._axes() if self._reenters(world.members.values()) else self._in_a_row(world.size)
        at = mesh_resize.data_axis(axes) or 0
        return mesh_resize.spared(axes, at, self._badness, to // replica)

    def _badness(self, rank: Rank) -> int:
        slot = self.world.seats[rank]
        return 10 * bool(self.rack.withdrawn(slot)) + int(self.rack.devices.fitness(slot))

    def shrink(
        self, committed: Position, gate: tuple[float, ...], leaving: Collection[Rank] = ()
    ) -> list[WorkerRecord]:
        """Shrink the world. Return the living workers that have no rank any more."""
        world = self.world
        axes, staying = self._smaller(leaving)
        left_over = [record for rank, record in sorted(world.members.items()) if rank not in staying]
        if self._reenters(world.members.values()):
            self._enter_again(committed, gate)
            assert world.old is not None
            for record in left_over:
                world.old.leaves(record, self.rack)
        else:
            self.sources.snapshots.clear()
        self._renumber(axes, staying)
        for record in left_over:
            record.rank = None
        return left_over

    def _smaller(self, leaving: Collection[Rank]) -> tuple[Axes, dict[Rank, Rank]]:
        world, axes = self.world, self._axes()
        at = mesh_resize.data_axis(axes)
        if not self._reenters(world.members.values()):
            staying = renumbered([rank for rank in world.members if rank not in leaving])
            return self._in_a_row(len(staying)), staying
        if at is None:
            return axes, {}
        return mesh_resize.without(axes, at, mesh_resize.places(axes, at, [*world.lost(), *leaving]))

    @property
    def room(self) -> int:
        """How many more ranks may join."""
        return max(self.world.most - self.world.size, 0)

    # -- grow ------------------------------------------------------------------------------------------------------
    def joining(self, ready: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Return those of the ``ready`` spares that can become additional ranks. If all would enter main again, there
        are none while ranks are lost."""
        world, members = self.world, self.world.members.values()
        if not self.room:
            return []
        fits = [record for record in ready if not record.fixed]
        room = min(self.room, len(fits))
        if not room or not members or any(record.fixed for record in members):
            return []
        if not self._reenters(members):
            return [] if world.rollback_incomplete() or self._unlike(world.members) else fits[:room]
        axes = self._axes()
        at = mesh_resize.data_axis(axes)
        if at is None or len(members) < world.size:
            return []
        replica = world.size // axes[at][1]
        by_slot = {record.worker.slot: record for record in fits}
        bundled = [by_slot[slot] for bundle in self.seating.bundles(by_slot) for slot in bundle]
        return bundled[: min(room, len(bundled)) // replica * replica]

    def grow(self, joining: Sequence[WorkerRecord], committed: Position, gate: tuple[float, ...]) -> bool:
        """Grow the world by these workers. Return False, and change nothing, if there is no state for them."""
        world = self.world
        if not self._reenters(world.members.values()):
            replica_class = self.classes[min(world.members)]
            for record in joining:
                self.classes[Rank(world.size)] = replica_class
                world.size += 1
                world.seat(Rank(world.size - 1), record)
            self._reshape(self._in_a_row(world.size))
            return True
        old = world.old or self._as_it_was(committed, gate)
        if old.state(world.members, self.rack, trusted=world.trusted) is None:
            return False
        axes = self._axes()
        at = mesh_resize.data_axis(axes)
        assert at is not None, "it was asked whether they can join"
        wider, there, new = mesh_resize.joined(axes, at, len(joining) * axes[at][1] // world.size)
        self._enter_again(committed, gate)
        self._renumber(wider, there)
        bound = [Rank(rank) for group in Mesh.of(dict(wider)).groups.tolist() for rank in group if rank in new]
        for rank, record in zip(bound, joining, strict=True):
            world.seat(rank, record)
        world.size += len(new)
        return True

    # -- both ------------------------------------------------------------------------------------------------------
    def _reenters(self, members: Collection[WorkerRecord]) -> bool:
        return any(record.reenters for record in members)

    def _unlike(self, ranks: Collection[Rank]) -> str:
        """Return why the ranks are not replicas of each other; "": they are. Ranks that leave or join must be replicas
        of those that stay."""
        found = {self.classes.get(rank, "") for rank in ranks}
        if (
            len(found) == 1
            and (one := next(iter(found)))
            and not one.startswith("unchecked")
            and not one.endswith(" alone")
        ):
            return ""
        return "the ranks are not each other's replicas, or have not been compared yet (before step 2)"

    def _axes(self) -> Axes:
        return self.seating.mesh.axes if self.seating.mesh is not None else self._in_a_row(self.world.size)

    def _in_a_row(self, size: int) -> Axes:
        mesh = self.seating.mesh
        return ((mesh.axes[0][0] if mesh is not None else "dp", size),)

    def _as_it_was(self, committed: Position, gate: tuple[float, ...]) -> OldWorld:
        world, plan = self.world, self.world.plan
        incomplete = world.rollback_incomplete()
        if incomplete and plan is not None and plan.rollback is not None:
            committed, gate = (
                Position(plan.rollback),
                (),
            )  # not all have gone back: their states belong to different histories
        return OldWorld(
            layout=world.layout,
            size=world.size,
            committed=committed,
            gate=gate,
            gone_back=incomplete or world.unsure,
            ranks={record.worker: rank for rank, record in world.stateful().items()},
            classes=dict(self.classes),
            snapshots=self.sources.snapshots,
        )

    def _can_go_on(self, record: WorkerRecord, committed: Position) -> bool:
        """Return whether a parked member has a state with which the world can go on: that of the committed unit in
        memory or, where memory is not trusted, a snapshot."""
        parked, trusted = record.parked, self.world.trusted
        if not record.stateful or parked is None:
            return False
        if self.world.unsure:
            steps = steps_in(self.world.layout, parked.snapshots)
            return any(Position(step) <= committed and (trusted is None or Position(step) <= trusted) for step in steps)
        return max(parked.passed, parked.entered) >= committed

    def _enter_again(self, committed: Position, gate: tuple[float, ...]) -> None:
        """Keep the present world as the old one. Snapshots and classes are the old world's until the plan is made."""
        if self.world.old is None:
            self.world.old = self._as_it_was(committed, gate)

    def _renumber(self, axes: Axes, ranks: Mapping[Rank, Rank]) -> None:
        classes = dict(self.classes)
        self.classes.clear()
        if self.world.old is None:
            self.classes.update((new, classes[old]) for old, new in sorted(ranks.items(), key=lambda pair: pair[1]))
        self.world.renumber(ranks)
        self._reshape(axes)

    def _reshape(self, axes: Axes) -> None:
        """Change the mesh, if there is one."""
        if self.seating.mesh is not None:
            self.seating.mesh = Mesh.of(dict(axes))
