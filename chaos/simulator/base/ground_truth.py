"""The ground truth of a simulated job: what has really happened, and the invariants that must hold at every step.

The training state is the history of the units that were applied, each with the generation whose gate it passed. Two
members whose histories differ never become equal again, so one comparison finds the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from rackrun.protocol.commands import GenerationPlan

__all__ = ["StateHistory", "GroundTruth", "Violation"]


class Violation(AssertionError):
    """An invariant does not hold."""


def must(holds: object, text: str) -> None:
    if not holds:
        raise Violation(text)


class StateHistory:
    """A training state, as the sequence of units that led to it. Equal histories are one object.

    A state that a GPU has corrupted differs from those of its replicas: it has a flaw, and whatever is computed with
    its gradients has the flaw, too (`then`). ``plain`` is the history without its flaws, which all members of one
    generation share.
    """

    __slots__ = ("_next", "before", "bits", "flaws", "generation", "plain", "unit", "world")

    def __init__(self, before: StateHistory | None, unit: int, generation: int, world: int) -> None:
        self.before, self.unit, self.generation, self.world = before, unit, generation, world
        self.plain: StateHistory = self
        self.flaws: frozenset[str] = frozenset()
        """The flaws of this state, including those that the other ranks' states had when it was computed."""
        self.bits: object = None if before is None else (hash(before.bits), unit, world)
        """What a digest depends on: computing the same unit again, in whatever generation, gives the same bits."""
        self._next: dict[object, StateHistory] = {}

    def then(self, generation: int, world: int, of: Collection[StateHistory] = ()) -> StateHistory:
        """Return the state after one more unit, computed by ``world`` ranks.

        ``of``: the states with which these ranks computed the gradients.
        """
        spoilt = frozenset(one for one in of if one.flaws)
        key = (generation, world, spoilt)
        if key not in self._next:
            after = StateHistory(self, self.unit + 1, generation, world)
            if self.flaws or spoilt:
                after.plain = self.plain.then(generation, world)
                after.flaws = self.flaws.union(*(one.flaws for one in spoilt))
                after.bits = (after.bits, frozenset(one.bits for one in spoilt))
            self._next[key] = after
        return self._next[key]

    def changed(self, flaw: str, bits: str = "") -> StateHistory:
        """Return the same state with other bits. ``bits`` identifies them, where another flaw may change the
        same bits."""
        if flaw not in self._next:
            wrong = StateHistory(self.before, self.unit, self.generation, self.world)
            wrong.plain, wrong.flaws, wrong.bits = self.plain, self.flaws | {flaw}, (self.bits, bits or flaw)
            self._next[flaw] = wrong
        return self._next[flaw]

    def at(self, unit: int) -> StateHistory:
        """Return the state as it was after ``unit``."""
        one = self
        while one.unit > unit and one.before is not None:
            one = one.before
        return one

    @property
    def digest(self) -> int:
        return hash(self.bits) & (2**62 - 1)

    def units(self) -> list[int]:
        """Return the units that were applied, oldest first."""
        return [one.unit for one in self._applied()]

    def worlds(self) -> list[int]:
        """Return the number of ranks that computed each unit. Without an exact reduction, the bits depend on it."""
        return [one.world for one in self._applied()]

    def _applied(self) -> list[StateHistory]:
        found: list[StateHistory] = []
        at: StateHistory | None = self
        while at is not None and at.before is not None:
            found.append(at)
            at = at.before
        return found[::-1]

    def __repr__(self) -> str:
        flaws = f" with {', '.join(sorted(self.flaws))}" if self.flaws else ""
        return f"after {self.unit} in generation {self.generation}{flaws}"


class GroundTruth:
    """The ground truth of one job."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.began = StateHistory(None, -1, 0, 0)
        self.committed = -1
        """The newest unit that any rank has seen pass its gate, in this world."""
        self.plans: dict[int, GenerationPlan] = {}
        self.announced = 0
        self.acting = 0
        """The newest generation in which a gate was complete."""
        self._states: dict[tuple[int, int], StateHistory] = {}
        self._floor = -1
        self.good = -1
        """The last unit that may be trusted, by the coordinator's latest information."""
        self.late: set[str] = set()
        """Flaws that came after the last comparison of everything that is compared."""
        self.distrusted: frozenset[str] = frozenset()
        """Flaws that the coordinator knows of: a state with one of them must not be used any more."""
        self._equal: dict[int, frozenset[str]] = {}
        """Unit -> the flaws that states had when all replicas were equal after it, which no comparison can find."""

    # -- generations
    def announces(self, generation: int) -> None:
        must(generation > self.announced, "generations are strictly monotone")
        self.announced = generation

    def planned(self, plan: GenerationPlan, *, launch: bool) -> None:
        """Check a new plan of the core. ``launch``: a world begins with it."""
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
        back = plan.rollback is not None or plan.reshard is not None  # it names where to go as committed
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
        """Check a gate that all ``ranks`` have entered.

        ``heard``: some rank has a connection to the coordinator. A world that was given up as a whole, because none of
        it was heard any more, may go on alone, because nothing of what it does is reported.
        """
        must(generation >= self.acting or not heard, f"generations {generation} and {self.acting} both act")
        self.acting = max(generation, self.acting)
        must(sorted(ranks) == list(range(world)), f"unit {unit} was computed by {ranks}: samples lost or doubled")

    def state(self, generation: int, history: StateHistory) -> None:
        """Check the state of a member of ``generation``."""
        known = self._states.setdefault((generation, history.unit), history.plain)
        must(known is history.plain, f"two histories in generation {generation} at unit {history.unit}")
        self.committed = max(self.committed, history.unit)

    # -- state that is not to be trusted
    def equal_after(self, unit: int, histories: Iterable[StateHistory]) -> None:
        """Note that all replicas have equal states after ``unit``. ``histories``: those of all ranks."""
        self._equal[unit] = frozenset[str]().union(*(one.flaws for one in histories))

    def flaws_then(self, unit: int, began: StateHistory) -> frozenset[str]:
        """Return the flaws that all states may have had after ``unit``, although they were equal."""
        later = [one for one in self._equal if one >= unit]
        return began.flaws | (self._equal[min(later)] if later and unit > began.unit else frozenset())

    def distrust(self, good: int, flaws: Iterable[str]) -> None:
        """Note what the coordinator has learned: ``good`` is the last unit to trust, and ``flaws`` are to be
        avoided."""
        self.good, self.distrusted = good, self.distrusted.union(flaws)

    def trusts(self, history: StateHistory, who: object) -> None:
        wrong = sorted(history.flaws & self.distrusted)
        must(not wrong, f"{who} goes on with a state that was found wrong: {', '.join(wrong)}")

    # -- the end
    def ended_well(self, finished: Mapping[int, StateHistory | None], *, clean: bool = False) -> None:
        """Check the states at a good end.

        ``clean``: nothing was done that could hide a wrong state from the comparison.
        """
        newest = self.plans[max(self.plans)]
        must(sorted(finished) == list(range(newest.world_size)), "not all ranks have finished")
        ends = {id(one.plain): one.plain for one in finished.values() if one is not None}
        must(len(ends) == 1, "ranks end with different states")
        flaws = [one.flaws for one in finished.values() if one is not None]
        unseen = frozenset[str]().union(*flaws) - (frozenset() if clean else flaws[0].intersection(*flaws)) - self.late
        must(not unseen, f"ranks end with states that are wrong, and nobody has seen it: {', '.join(sorted(unseen))}")
        units = next(iter(ends.values())).units()
        must(units == list(range(self.units)), f"each unit once, but: {units}")
