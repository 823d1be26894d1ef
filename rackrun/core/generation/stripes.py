"""Which lost snapshots can be rebuilt from parity: the rows that hold a set's stripes, and the snapshots that still
match them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rackrun.core.generation.restore_plan import StoredSnapshots
from rackrun.protocol.commands import GenerationPlan, Keeper, Restore, Stripes
from rackrun.protocol.events import SnapshotStriped
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, Step

__all__ = ["ParityRows"]


@dataclass(frozen=True, slots=True)
class _Given:
    """Record that all keepers have the stripes of a member's snapshot."""

    incarnation: Incarnation
    intact: bool = True
    """Whether the process's own snapshot of the step, if it has one, is still what it gave to the keepers, byte for
    byte."""


@dataclass(slots=True)
class ParityRows:
    """The parity rows of recent generations."""

    _sets: dict[Generation, dict[Rank, tuple[Rank, ...]]] = field(default_factory=dict)
    """For each generation and rank, the members of its set."""
    _parity: dict[Generation, int] = field(default_factory=dict)
    """For each generation, how many members of a set may be lost with everything that they hold."""
    _keepers: dict[Generation, dict[Rank, Keeper]] = field(default_factory=dict)
    """For each generation and rank, the agent that keeps its row. The row is lost with its tray, but so is the member's
    snapshot, which is looked for first."""
    _ends: dict[Generation, Position] = field(default_factory=dict)
    """For each plan, the last unit of the history that it continues."""
    _given: dict[tuple[Generation, Step], dict[Rank, _Given]] = field(default_factory=dict)

    def planned(self, plan: GenerationPlan) -> None:
        """Drop what does not belong to the history of ``plan``, and use its sets for stripes that are given from now
        on."""
        end = plan.committed if plan.rollback is None else Position(plan.rollback)
        again = {member.rank: member.incarnation for member in plan.members if member.fresh}
        self._given = {key: of for key, of in self._given.items() if Position(key[1]) <= end}
        for of in self._given.values():
            for rank, incarnation in again.items():
                if (one := of.get(rank)) is not None and one.incarnation == incarnation:
                    of[rank] = replace(one, intact=False)
        self._ends[plan.generation] = end
        self._parity[plan.generation] = plan.parity
        sets = [tuple([one.rank for one in of]) for of in plan.sets]
        self._sets[plan.generation] = {rank: ranks for ranks in sets for rank in ranks}
        self._keepers[plan.generation] = {one.rank: one for of in plan.sets for one in of}
        self._forget_old()

    def striped(self, rank: Rank, event: SnapshotStriped) -> None:
        """Record complete parity of a snapshot of ``rank``. A late event, or one from no set, changes nothing."""
        ends = [end for generation, end in self._ends.items() if generation > event.generation]
        if rank not in self._sets.get(event.generation, {}) or any(end < Position(event.step) for end in ends):
            return  # the event comes late: its step is computed again
        for key, given in list(self._given.items()) if event.besides >= 0 else ():
            if key[1] not in (event.step, event.besides):
                given.pop(rank, None)
                if not given:
                    del self._given[key]
        self._given.setdefault((event.generation, event.step), {})[rank] = _Given(event.incarnation)

    def damaged(self, row: str, step: Step) -> None:
        """Drop the stripes of the whole set of this row, because what was rebuilt with them was wrong."""
        for (generation, given_step), given in self._given.items():
            if given_step == step:
                rows = {
                    f"{one.address}/{generation}/{one.rank}": one.rank for one in self._keepers[generation].values()
                }
                for member in self._sets[generation][rows[row]] if row in rows else ():
                    given.pop(member, None)

    def rebuild(self, rank: Rank, step: Step, snapshots: Callable[[Rank], Sequence[StoredSnapshots]]) -> Restore | None:
        """Return how ``rank``'s snapshot of ``step`` can be rebuilt; None if it cannot.

        ``snapshots`` returns the snapshots of a rank on live trays.
        """
        for (generation, given_step), given in reversed(self._given.items()):
            members = self._sets[generation].get(rank, ())
            if given_step != step or not members or any(member not in given for member in members):
                continue
            keepers, parity = self._keepers[generation], self._parity[generation]
            found = []
            for member in (member for member in members if member != rank):
                whose = given[member]
                own = [
                    kept.where
                    for kept in snapshots(member)
                    if kept.incarnation == whose.incarnation and step in kept.steps and whose.intact
                ]
                if own:
                    row = f"{keepers[member].address}/{generation}/{member}"
                    found.append(Stripes(rank=member, row=row, snapshot=own[0]))
            if len(members) - len(found) <= parity:
                return Restore(rank=rank, rebuild=tuple(found), members=members, parity=parity)
        return None

    def clear(self) -> None:
        """Forget all parity, and the sets of all generations."""
        self._sets.clear()
        self._parity.clear()
        self._keepers.clear()
        self._ends.clear()
        self._given.clear()

    def _forget_old(self) -> None:
        """Forget old generations. Stripes that are still under way are at most of the generation before the present
        one."""
        self._given = {key: given for key, given in self._given.items() if given}
        wanted = [*(generation for generation, _ in self._given), *list(self._sets)[-2:]]
        for generation in [generation for generation in self._sets if generation not in wanted]:
            del self._sets[generation], self._parity[generation], self._keepers[generation]
        self._ends = {generation: end for generation, end in self._ends.items() if generation >= min(wanted)}
