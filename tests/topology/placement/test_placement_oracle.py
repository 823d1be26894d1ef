"""On small racks every assignment is tried: none is better than the solver's, and where it finds none there is none."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.placement import exhaustive
from rackrun.topology.placement.objective import Terms
from rackrun.topology.placement.rank_assignment import Placement, place
from tests.topology.placements import Drawn, Oracle, chances, draw_case, draw_health

EXACT = Terms._fields.index("touched")
"""The terms before it are exact in worlds of any size; those from it on only where there are few ways, and all are looked at."""


def agrees(case: Drawn, previous: tuple[SlotId, ...] | None, terms: int = len(Terms._fields)) -> Placement | None:
    oracle = Oracle(case.topology, case.mesh, case.spares, case.health, case.lemons, previous)
    best = oracle.best()
    try:
        found = place(
            case.topology, case.mesh, spares=case.spares, health=case.health, lemons=case.lemons, previous=previous
        )
    except DoesNotFit:
        assert best is None
        return None
    assert best is not None
    assert tuple(found.terms) == oracle.terms(found.slots), "it counts what the oracle counts"
    assert tuple(found.terms)[:terms] == best[:terms]
    return found


def from_nothing_and_after_faults(chance: random.Random, slots: int = 6, terms: int = len(Terms._fields)) -> None:
    case = draw_case(chance, slots, slots - 1, racks=3, trays=3, gpus=3)
    placed = agrees(case, None, terms)
    for _ in range(chance.randint(0, 3)):
        if placed is not None:
            case.health |= draw_health(chance, case.topology, chance.randint(1, 3))
            placed = agrees(case, placed.slots, terms)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(chances())
def test_nothing_is_better_than_what_the_solver_finds(chance: random.Random) -> None:
    from_nothing_and_after_faults(chance)


@pytest.mark.parametrize("seed", range(3))
def test_the_greedy_choice_alone_is_exact_up_to_the_number_of_moves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "CELLS_MAX", 0)
    for number in range(100):
        from_nothing_and_after_faults(random.Random(seed * 1_000 + number), terms=EXACT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_better_in_many_more_cases(seed: int) -> None:
    for number in range(200):
        from_nothing_and_after_faults(random.Random(seed * 1_000 + number), slots=6 + number % 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_the_greedy_choice_is_exact_in_many_more_cases(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "CELLS_MAX", 0)
    for number in range(500):
        from_nothing_and_after_faults(random.Random(10**6 + seed * 1_000 + number), slots=6 + number % 2, terms=EXACT)
