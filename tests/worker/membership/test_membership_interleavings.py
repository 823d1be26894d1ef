"""In every order in which ranks, losses and the coordinator can act, a unit is counted by all survivors or by none, from the
same gate, and what a live rank saw pass is never taken back."""

from __future__ import annotations

from typing import Any

import pytest

from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Generation, Position
from rackrun.worker.membership.decisions.membership_machine import MembershipMachine
from rackrun.worker.membership.decisions.membership_states import UnitState
from tests.variants import in_stories
from tests.worker.membership_model import World, Wrong, explore


@pytest.mark.parametrize(
    ("ranks", "how", "states"),
    [
        (1, {"steps": 2, "losses": 0, "cuts": 1}, 50),
        (2, {"steps": 2, "losses": 1}, 300),
        (2, {"steps": 2, "losses": 0, "cuts": 1}, 1000),
        (2, {"steps": 2, "losses": 1, "cuts": 1}, 5000),
        (2, {"steps": 2, "losses": 1, "replaces": True}, 500),
        (2, {"steps": 1, "losses": 1, "cuts": 1, "refuses": True}, 4000),
        (3, {"steps": 1, "losses": 2}, 9000),
        (3, {"steps": 2, "losses": 1}, 6000),
        *in_stories((3, {"steps": 2, "losses": 1, "replaces": True}, 10_000), names=3),
        (3, {"steps": 1, "losses": 1, "refuses": True}, 3000),
    ],
    ids=str,
)
def test_a_unit_counts_for_all_survivors_or_for_none(ranks: int, how: dict[str, Any], states: int) -> None:
    assert explore(World.of(ranks, **how)) > states


# -- the same exploration finds each of these mistakes ----------------------------------------------------------------
class GoesOnAfterItsReport(MembershipMachine):
    """It takes in sums that arrive after it has reported that it saw none."""

    __slots__ = ()

    def announce_break(self, generation: Generation) -> bool:
        announced = super().announce_break(generation)
        self.broken = False
        return announced


class DiscardsWhatItSawNotPass(MembershipMachine):
    """A unit whose gate broke is done again, whatever the plan says."""

    __slots__ = ()

    def take_plan(self, plan: GenerationPlan) -> bool:
        if self.unit is UnitState.ENTERED:
            self.refuse_gate()
        return super().take_plan(plan)


class CountsWhatItEntered(MembershipMachine):
    """A unit whose gate broke counts, whatever the plan says."""

    __slots__ = ()

    def take_plan(self, plan: GenerationPlan) -> bool:
        if self.unit is UnitState.ENTERED and not self.is_superseded(plan.generation):
            self.passed = self.entered
        return super().take_plan(plan)


class EntersBrokenGates(MembershipMachine):
    """It enters the gate of a generation of which it has reported that it had not entered it."""

    __slots__ = ()

    def enter_gate(self, at: Position) -> bool:
        broken, self.broken = self.broken, False
        entered = super().enter_gate(at)
        self.broken = broken
        return entered


class TakesOldBreaks(MembershipMachine):
    """It takes no notice of a break after a collective has failed here."""

    __slots__ = ()

    def announce_break(self, generation: Generation) -> bool:
        return not self.broken and super().announce_break(generation)


class ForgetsThatItFailed(MembershipMachine):
    """A collective that fails breaks nothing here until the coordinator says so."""

    __slots__ = ()

    def fail_collective(self, generation: int, because: str, now_s: float) -> bool:
        failed = super().fail_collective(generation, because, now_s)
        self.broken = False
        return failed


@pytest.mark.parametrize(
    "mistaken",
    [
        GoesOnAfterItsReport,
        DiscardsWhatItSawNotPass,
        CountsWhatItEntered,
        EntersBrokenGates,
        TakesOldBreaks,
        ForgetsThatItFailed,
    ],
)
def test_a_machine_that_decides_wrongly_is_found(mistaken: type[MembershipMachine]) -> None:
    with pytest.raises(Wrong):
        explore(World.of(3, mistaken, steps=2, losses=1))


def test_a_coordinator_that_forgets_what_its_last_plan_said_is_found() -> None:
    """The rank that knew it is the next one that is lost."""
    with pytest.raises(Wrong, match="has declared committed"):
        explore(World.of(3, steps=1, losses=2, floors=False))
