"""The world gets smaller, and larger again: which ranks go on under which numbers, and when that is possible.

*Shrink*: ranks are lost and nobody takes them over; the others go on without them. *Grow*: workers wait that the world, as large
as it began, has a place for. The global batch stays what it is: its micro-batches are dealt out anew. In place, this takes nothing
but other numbers: every rank is a whole replica of every other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rackrun.core.config import JobConfig
from rackrun.core.ids import Position, Rank
from rackrun.core.rack import RackMachine
from rackrun.core.seating import Seating
from rackrun.core.verdict import Report
from rackrun.core.workers import WorkerRecord
from rackrun.core.world import World
from rackrun.topology.mesh import Mesh

__all__ = ["Resizing", "renumbered"]


def renumbered(staying: Collection[Rank]) -> dict[Rank, Rank]:
    """Old rank -> new rank, ``0`` to ``len(staying) - 1``. Who can keeps its number; the last ones fill the gaps."""
    size = len(staying)
    gaps = iter(rank for rank in range(size) if rank not in staying)
    return {rank: rank if rank < size else Rank(next(gaps)) for rank in sorted(staying)}


@dataclass(slots=True)
class Resizing:
    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    classes: dict[Rank, str]

    # -- shrink ----------------------------------------------------------------------------------------------------
    def why_not_shrink(self, reports: Mapping[Rank, Report], committed: Position) -> str:
        """What is in the way of going on without the ranks that are lost. "": nothing. ``reports``: of those that have state."""
        if not self.config.min_ranks:
            return "the number of ranks is fixed (--min-ranks 0)"
        members = self.world.members
        if len(members) < self.config.min_ranks:
            return (
                f"{len(members)} ranks would be left, and {self.config.min_ranks} are the fewest allowed (--min-ranks)"
            )
        if fixed := self._fixed(members.values()):
            return fixed
        if self.world.torn() or not any(max(report.passed, report.entered) >= committed for report in reports.values()):
            return "nobody has the state of the last step"
        return self._unlike(members)

    def shrink(self) -> str:
        """Do it. Returns what happens, for people."""
        world, before = self.world, self.world.size
        self._renumber(renumbered(world.members))
        return f"goes on with {world.size} of {before} ranks"

    # -- grow ------------------------------------------------------------------------------------------------------
    def joining(self, ready: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Who of those that are ``ready`` can become a rank more."""
        world = self.world
        room = world.full - world.size
        fits = [record for record in ready if not record.fixed]
        if not room or not fits or world.torn() or self._fixed(world.members.values()) or self._unlike(world.members):
            return []
        return fits[:room]

    def grow(self, joining: Sequence[WorkerRecord]) -> str:
        """Do it. Returns what happens, for people."""
        world = self.world
        replica_class = self.classes[min(world.members)]
        for record in joining:
            self.classes[Rank(world.size)] = replica_class
            world.size += 1
            world.seat(Rank(world.size - 1), record)
        self._reshape()
        slots = ", ".join(record.worker.slot for record in joining)
        return f"{slots} {'joins' if len(joining) == 1 else 'join'}, {world.size} of {world.full} ranks"

    # -- both ------------------------------------------------------------------------------------------------------
    def _fixed(self, members: Collection[WorkerRecord]) -> str:
        return next((record.fixed for record in members if record.fixed), "")

    def _unlike(self, ranks: Collection[Rank]) -> str:
        """Whoever goes has to be a replica of whoever stays, and of whoever comes."""
        found = {self.classes.get(rank, "") for rank in ranks}
        if len(found) == 1 and not next(iter(found)).endswith(" alone"):
            return ""
        return "the ranks are not each other's replicas, or have not been compared yet (before step 2)"

    def _renumber(self, ranks: Mapping[Rank, Rank]) -> None:
        world, classes = self.world, dict(self.classes)
        members, seats = dict(world.members), dict(world.seats)
        world.size = len(ranks)
        world.members.clear()
        world.seats.clear()
        self.classes.clear()
        for old, new in sorted(ranks.items(), key=lambda pair: pair[1]):
            self.classes[new] = classes[old]
            world.seats[new] = seats[old]
            world.seat(new, members[old])
        self._reshape()

    def _reshape(self) -> None:
        """The one axis of the mesh, if it has been named."""
        mesh = self.seating.mesh
        if mesh is not None:
            self.seating.mesh = Mesh.of({mesh.axes[0][0]: self.world.size})
