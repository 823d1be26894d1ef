"""A slow rank gets fewer micro-batches, and the others more (``--slow-ranks shift``): no rank goes, no step is done again.

How many follows from how much longer it takes for the same work, so a rank that has little to do is not taken for a fast one, and keeps
its share until it is no longer slow. Ranks that share their samples have one share: the slowest of them counts. The global batch is what it was.

A deal is told to all ranks of a generation, and takes effect when the gate of a step has told that all have heard. What a generation begins
with stands in its plan, made from what is known of those who are still there. So whatever is lost in the middle of a change, all
have the same shares: the former, the new, or the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rackrun.core.generation.world import Phase, World
from rackrun.core.placement.seating import Seating
from rackrun.core.stragglers.shares import shared_out, sharing
from rackrun.protocol.commands import Command, DealShards, Notice, Worker
from rackrun.protocol.events import SlowRanksChanged
from rackrun.protocol.job_config import JobConfig

__all__ = ["Shifting"]


@dataclass(slots=True)
class Shifting:
    config: JobConfig
    world: World
    seating: Seating
    emit: Callable[[Command], None]
    ends: Callable[[], bool]
    """This generation, or the job, is about to: nothing is dealt in it any more."""
    _times: dict[Worker, float] = field(default_factory=dict)
    """Of those who are slow."""
    _rest: float = 0.0
    _meets: bool = False
    _measured: int = 0
    """The size of the world in which that was."""
    _shares: tuple[int, ...] = ()
    """As all have them, or will when they have heard."""
    _number: int = 0
    """Of the newest deal of this generation."""
    _kept: tuple[str, str] = ("", "")
    """Who is slow and keeps its share, and why: said once."""

    def heard(self, event: SlowRanksChanged) -> None:
        world = self.world
        if "shift" not in self.config.slow_ranks or world.plan is None or event.generation != world.plan.generation:
            return
        self._times = {
            world.members[one.rank].worker: one.times
            for one in event.slow
            if one.rank in world.members and world.seats[one.rank] == one.slot
        }
        self._rest, self._meets, self._measured = event.rest, event.meets, world.size
        self.look()

    def look(self) -> None:
        """Deal anew, if there is a reason to."""
        world = self.world
        if world.phase is not Phase.TRAINING or self.ends():
            return
        shares = self._wanted()
        self._say_who_keeps(shares)
        if shares == self._shares:
            return
        self._shares = shares
        self._number += 1
        told = self._told(shares)
        self.emit(Notice(text=told))
        self.emit(
            DealShards(
                generation=world.generation,
                number=self._number,
                shares=shares,
                workers=world.workers(),
                because=told,
            )
        )

    def in_plan(self) -> tuple[int, ...]:
        """With which shares a generation of these members begins; deals are counted anew."""
        there = set(self.world.workers()) if self.world.size == self._measured else set()
        self._times = {worker: times for worker, times in self._times.items() if worker in there}
        self._shares, self._number = self._wanted(), 0
        return self._shares

    def forget(self) -> None:
        """The world begins again."""
        self._times.clear()
        self._shares, self._number = (), 0

    def check_invariants(self) -> None:
        if self._shares and self.world.phase in (Phase.TRAINING, Phase.RESUMING):
            assert len(self._shares) == len(self._places()), "a share for each place along the data axes"
            assert (sum(self._shares), min(self._shares) > 0) == (self._total(), True), "all micro-batches, none twice"

    def _wanted(self) -> tuple[int, ...]:
        total = self._total()
        if not self._times or not total or self._meets:
            return ()
        return shared_out(total, [max(self._times_of(rank) for rank in place) for place in self._places()], self._rest)

    def _times_of(self, rank: int) -> float:
        record = self.world.members.get(rank)  # type: ignore[call-overload]
        return max(self._times.get(record.worker, 1.0), 1.0) if record is not None else 1.0

    def _places(self) -> list[tuple[int, ...]]:
        mesh = self.seating.mesh
        return sharing(mesh.axes if mesh is not None else (), self.world.size)

    def _total(self) -> int:
        return next((record.shards for record in self.world.members.values() if record.shards), 0)

    # -- for people
    def _slow(self) -> str:
        ranks = [str(rank) for rank, record in sorted(self.world.members.items()) if record.worker in self._times]
        return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are"

    def _told(self, shares: tuple[int, ...]) -> str:
        if not shares:
            return "all ranks get as many micro-batches again"
        slow = [max(map(self._times_of, place)) > 1 for place in self._places()]
        fewer = sorted({share for share, one in zip(shares, slow, strict=True) if one})
        told = " or ".join(map(str, fewer))
        return f"{self._slow()} slow, with {told} of {sum(shares)} micro-batches from now on, others with up to {max(shares)}"

    def _say_who_keeps(self, shares: tuple[int, ...]) -> None:
        if not self._times or shares:
            return
        why = "all ranks would wait no less for each other with fewer"
        if not self._total():
            why = "the global batch follows the world, or has not been told"
        elif self._meets:
            why = "the ranks meet in collectives of every micro-batch, so all have to compute as many"
        kept = self._slow(), why
        if kept != self._kept:
            self._kept = kept
            self.emit(Notice(text=f"{kept[0]} slow, with as many micro-batches as before: {why}"))
