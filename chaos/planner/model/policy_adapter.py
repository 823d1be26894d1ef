"""Ask the core's own policy as the core does, with a `ClusterView` of what the simulation knows.

`rackrun.core.policy.choice` prices the rungs and chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.fleet_state import FleetState, NewSlots
from rackrun.core.policy.choice import allows, choose, refusal, settled
from rackrun.core.policy.measured_costs import SAMPLES
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.policy_types import (
    ClusterView,
    Costs,
    Decision,
    Failure,
    FailureCause,
    RankNow,
    Rules,
    Rung,
    SpareNow,
    Weights,
)

__all__ = ["PolicyAdapter", "Policy", "Situation"]

Policy = Callable[[Failure, ClusterView], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Facts for a decision that the fleet's state does not contain."""

    step: int
    step_s: float
    """Seconds of a step in the present world."""
    rollback: int | None
    """Steps that are computed again if state comes from memory; None: some state is lost there."""
    checkpoint_age_s: float
    waited_s: float
    restarts_left: int
    absorbs: int = 0


@dataclass(slots=True)
class PolicyAdapter:
    """The policy of one run."""

    costs: PlanCosts
    rules: Rules = field(default_factory=Rules)
    weights: Weights = field(default_factory=Weights)
    function: Policy | None = None
    decisions: int = 0
    _repairs_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _spares: tuple[SpareNow, ...] = ()

    @property
    def asks_who_takes_over(self) -> bool:
        """Whether `decide` reads its ``staff`` at all.

        An order of rungs may contain none in which spares take over or are waited for.
        """
        if self.function is not None:
            return True
        return any(allows(self.rules, rung) for rung in (Rung.SWAP, Rung.MOVE, Rung.ACQUIRE, Rung.WAIT, Rung.HOLD))

    def repaired(self, seconds: float) -> None:
        """Note that a tray was gone for ``seconds``, which the core measures, too."""
        self._repairs_s.append(seconds)

    def decide(self, hall: FleetState, staff: NewSlots | None, now: Situation) -> Decision:
        """Decide what to do about the ranks that are lost."""
        self.decisions += 1
        failure = self._failure(hall)
        view = self._view(hall, staff, now)
        if self.function is not None:
            answer = self.function(failure, view)
            if answer is not None and not isinstance(answer, Decision):
                raise PlannerError(
                    f"the policy returned a {type(answer).__name__}.", remedy="return a Decision, or None."
                )
            if answer is not None and not refusal(answer, failure, view):
                return settled(answer, failure, view, self.weights)
        return choose(failure, view, self.rules, self.weights)

    def _failure(self, hall: FleetState) -> Failure:
        ranks = tuple(Rank(rank) for rank in sorted(hall.lost))
        slots = tuple(self._name(hall, int(hall.seats[rank])) for rank in ranks)
        return Failure(
            what=f"{len(ranks)} ranks lost" if ranks else "a step did not end",
            ranks=ranks,
            slots=slots,
            whose=_whose(ranks),
        )

    def _view(self, hall: FleetState, staff: NewSlots | None, now: Situation) -> ClusterView:
        job, lost, ready, starting = hall.job, hall.lost, hall.ready, hall.starting
        enough = ready >= len(lost)
        state = now.rollback is not None
        stays = hall.ranks - len(hall.hit()) * job.replica if lost else 0
        why_no_shrink = _no_shrink(stays, job.min_ranks, state=state) if lost else "nobody is lost"
        return ClusterView(
            world_size=hall.ranks,
            step=now.step,
            ranks=tuple(
                RankNow(rank=Rank(rank), slot=self._name(hall, int(hall.seats[rank])), alive=False) for rank in lost
            ),
            spares=self._spare(ready + starting),
            usable_slots=hall.usable,
            takeovers=self._names(hall, staff.takeovers) if staff else {},
            uprooted=self._names(hall, staff.uprooted) if staff else {},
            short=0 if staff else 1 if enough else len(lost) - ready,
            coming=starting,
            why_short="" if staff else f"{len(lost)} ranks to replace, {ready} spares are ready",
            rollback_steps=now.rollback,
            may_begin_again=True,
            shrink_to=0 if why_no_shrink else stays,
            why_no_shrink=why_no_shrink,
            exact=job.exact,
            placeable=staff is not None or hall.may_begin(),
            restarts_left=now.restarts_left,
            waited_s=now.waited_s,
            repair_patience_s=job.wait_for_hardware_s,
            absorbs=now.absorbs,
            recoveries=self.decisions,
            costs=Costs(
                step_s=now.step_s,
                regroup_s=self.costs.regroup_s,
                takeover_s=self.costs.takeover_s,
                state_bytes=self.costs.state_bytes,
                start_s=self.costs.start_s,
                repair_s=median(self._repairs_s) if self._repairs_s else None,
                checkpoint_age_s=now.checkpoint_age_s,
            ),
        )

    def _spare(self, count: int) -> tuple[SpareNow, ...]:
        if len(self._spares) != count:
            self._spares = (SpareNow(slot=SlotId(""), state="ready"),) * count
        return self._spares

    def _names(self, hall: FleetState, slots: dict[int, int]) -> dict[Rank, SlotId]:
        return {Rank(rank): self._name(hall, slot) for rank, slot in slots.items()}

    @staticmethod
    def _name(hall: FleetState, slot: int) -> SlotId:
        return hall.board.slots[slot]


def _whose(ranks: tuple[Rank, ...]) -> FailureCause:
    return FailureCause.HARDWARE if ranks else FailureCause.NETWORK


def _no_shrink(stays: int, min_ranks: int, *, state: bool) -> str:
    if not min_ranks:
        return "the number of ranks is fixed (--min-ranks 0)"
    if stays < min_ranks:
        return f"{stays} ranks would be left, of {min_ranks} at the least (--min-ranks)"
    return "" if state else "no copy of some state is left in memory"
