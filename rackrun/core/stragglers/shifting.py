"""Shifting of micro-batches from slow ranks to the others (``--slow-ranks shift``), without losing ranks or repeating
steps.

Shares follow from how much longer a rank takes for the same work. So a rank that has little to do does not count as
fast, and keeps its share until it is no longer slow. Ranks that share their samples have one share, set by the slowest
of them. The global batch does not change.

A deal is sent to all ranks of a generation, and takes effect when the gate of a step has shown that all have received
it. The shares at the beginning of a generation are in its plan, computed for the workers that are still there. So
whatever is lost during a change, all ranks have the same shares: the old, the new, or the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.placement.seating import Seating
from rackrun.core.stragglers.shares import shared_out, sharing
from rackrun.protocol.commands import DealShards, Notice, Worker
from rackrun.protocol.events import SlowRanksChanged
from rackrun.protocol.job_config import JobConfig

__all__ = ["Shifting"]


@dataclass(slots=True)
class Shifting:
    """Computes shares and deals them."""

    config: JobConfig
    world: World
    seating: Seating
    out: Outbox
    _times: dict[Worker, float] = field(default_factory=dict)
    """For each slow worker, its time divided by that of its peers."""
    _rest: float = 0.0
    _meets: bool = False
    _measured: int = 0
    """World size in which they were measured."""
    _shares: tuple[int, ...] = ()
    """The shares that all ranks have, or will have when they have received the deal."""
    _number: int = 0
    """Number of the latest deal in this generation."""
    _kept: tuple[str, str] = ("", "")
    """Which ranks are slow and keep their share, and why; reported once."""

    def measure(self, event: SlowRanksChanged) -> None:
        """Handle a report of slow ranks."""
        world = self.world
        if "shift" not in self.config.slow_ranks:
            return
        self._times = {
            world.members[one.rank].worker: one.times
            for one in event.slow
            if one.rank in world.members and world.seats[one.rank] == one.slot
        }
        self._rest, self._meets, self._measured = event.rest, event.meets, world.size
        self.deal()

    def deal(self) -> None:
        """Deal new shares if they differ from the present ones."""
        world = self.world
        if world.phase is not Phase.TRAINING or self.world.generation_ends:
            return
        shares = self._wanted()
        self._say_who_keeps(shares)
        if shares == self._shares:
            return
        self._shares = shares
        self._number += 1
        told = self._told(shares)
        self.out.emit(Notice(text=told))
        self.out.emit(
            DealShards(
                generation=world.generation,
                number=self._number,
                shares=shares,
                workers=world.workers(),
                because=told,
            )
        )

    def in_plan(self) -> tuple[int, ...]:
        """Return the shares with which a generation of the present members begins. Deals are counted from 1 again."""
        there = set(self.world.workers()) if self.world.size == self._measured else set()
        self._times = {worker: times for worker, times in self._times.items() if worker in there}
        self._shares, self._number = self._wanted(), 0
        return self._shares

    def forget(self) -> None:
        """Forget everything, because the world begins again."""
        self._times.clear()
        self._shares, self._number = (), 0

    def check_invariants(self) -> None:
        """Raise AssertionError if the shares do not fit the world that trains."""
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
            self.out.emit(Notice(text=f"{kept[0]} slow, with as many micro-batches as before: {why}"))
