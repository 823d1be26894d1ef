"""What has really happened, whoever knows of it; and what must hold of that at every step.

Training state is the history of the units that were applied, each with the generation whose gate it passed. Two members that
took different histories for the same never become equal again, so one comparison finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rackrun.core.commands import Plan

__all__ = ["History", "Truth", "Violation"]


class Violation(AssertionError):
    """Something is not as it must be."""


def must(holds: object, text: str) -> None:
    if not holds:
        raise Violation(text)


class History:
    """A state, as what led to it. Equal histories are one object."""

    __slots__ = ("_next", "before", "generation", "unit", "world")

    def __init__(self, before: History | None, unit: int, generation: int, world: int) -> None:
        self.before, self.unit, self.generation, self.world = before, unit, generation, world
        self._next: dict[tuple[int, int], History] = {}

    def then(self, generation: int, world: int) -> History:
        """After one unit more, that ``world`` ranks have computed."""
        key = (generation, world)
        if key not in self._next:
            self._next[key] = History(self, self.unit + 1, generation, world)
        return self._next[key]

    def units(self) -> list[int]:
        """All that were applied, oldest first."""
        return [one.unit for one in self._applied()]

    def worlds(self) -> list[int]:
        """How many ranks computed each unit: with a reduction that is not exact, its bits depend on that."""
        return [one.world for one in self._applied()]

    def _applied(self) -> list[History]:
        found: list[History] = []
        at: History | None = self
        while at is not None and at.before is not None:
            found.append(at)
            at = at.before
        return found[::-1]

    def __repr__(self) -> str:
        return f"after {self.unit} in generation {self.generation}"


class Truth:
    def __init__(self, units: int) -> None:
        self.units = units
        self.began = History(None, -1, 0, 0)
        self.committed = -1
        """The newest unit that anybody has seen pass, in this world."""
        self.plans: dict[int, Plan] = {}
        self.announced = 0
        self.acting = 0
        """The newest generation that a gate was full in."""
        self._states: dict[tuple[int, int], History] = {}
        self._floor = -1

    # -- generations
    def announces(self, generation: int) -> None:
        must(generation > self.announced, "generations are strictly monotone")
        self.announced = generation

    def planned(self, plan: Plan, *, launch: bool) -> None:
        must(plan.generation not in self.plans, "two plans of one generation")
        must(plan.generation >= self.announced, "a plan of an older generation")
        self.announced = plan.generation
        self.plans[plan.generation] = plan
        members = plan.members
        must([m.rank for m in members] == list(range(plan.world_size)), "a plan without each rank once")
        must(len({m.slot for m in members}) == plan.world_size, "two ranks in one slot")
        must(len({m.incarnation for m in members}) == plan.world_size, "two ranks in one process")
        if launch:
            self._floor = self.committed = -1
            return
        back = plan.rollback is not None or plan.reshard is not None  # which says where to as what is committed
        must(back or plan.committed.step >= self._floor, f"{self._floor} is committed no more: {plan.committed}")
        self._floor = plan.committed.step if plan.rollback is None else plan.rollback
        must(self._floor <= plan.committed.step, "a rollback to what is not committed")
        if plan.reshard is not None:
            must(not plan.restores and all(plan.reshard.images), "a reshard without all images")
            return
        restored = {restore.rank for restore in plan.restores}
        must(restored == {m.rank for m in members if m.fresh}, "a fresh member without a source")
        for restore in plan.restores:
            ways = [bool(restore.sources), bool(restore.snapshot), bool(restore.rebuild)]
            must(ways.count(True) == 1, "not one source")
            must(not set(restore.sources) & restored, "a source without state")

    # -- gates
    def gate_full(self, generation: int, unit: int, ranks: Sequence[int], world: int, *, heard: bool) -> None:
        """``heard``: somebody of them has a connection to the coordinator. A world that was given up as a whole, because nobody of it was
        heard any more, may go on alone: what it does is told to nobody."""
        must(generation >= self.acting or not heard, f"generations {generation} and {self.acting} both act")
        self.acting = max(generation, self.acting)
        must(sorted(ranks) == list(range(world)), f"unit {unit} was computed by {ranks}: samples lost or doubled")

    def state(self, generation: int, history: History) -> None:
        """A member of ``generation`` stands there."""
        known = self._states.setdefault((generation, history.unit), history)
        must(known is history, f"two histories in generation {generation} at unit {history.unit}")
        self.committed = max(self.committed, history.unit)

    # -- the end
    def ended_well(self, finished: Mapping[int, History | None]) -> None:
        newest = self.plans[max(self.plans)]
        must(sorted(finished) == list(range(newest.world_size)), "not all ranks have finished")
        ends = {id(one): one for one in finished.values() if one is not None}
        must(len(ends) == 1, "ranks end with different states")
        units = next(iter(ends.values())).units()
        must(units == list(range(self.units)), f"each unit once, but: {units}")
