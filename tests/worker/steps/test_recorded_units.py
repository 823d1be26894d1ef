"""Which steps and phases are done again."""

from __future__ import annotations

from typing import cast

from rackrun.protocol.ids import Position
from rackrun.worker.steps.recorded_units import RecordedUnit, RecordedUnits


def at(step: int, phase: int = 0) -> Position:
    return Position(step, phase)


def recorded(*positions: Position) -> RecordedUnits:
    units = RecordedUnits()
    for position in positions:
        units.append(RecordedUnit(position, lambda _step: None))
    return units


def test_the_oldest_that_has_not_passed_comes_first() -> None:
    units = recorded(at(3), at(3, 1), at(4), at(5))
    for passed, first in ((at(2), at(3)), (at(3), at(3, 1)), (at(3, 1), at(4)), (at(4), at(5))):
        unit = units.first_after(passed)
        assert unit is not None
        assert unit.at == first
    assert units.first_after(at(5)) is None
    assert recorded().first_after(at(0)) is None


def test_one_is_ahead_when_the_newest_is_later() -> None:
    units = recorded(at(3), at(4))
    assert units.any_after(at(3))
    assert not units.any_after(at(4))
    assert not recorded().any_after(at(0))


def test_what_nobody_goes_back_to_is_forgotten() -> None:
    units = recorded(at(3), at(3, 1), at(4), at(5))
    units.keep_after(at(3, 1))
    assert len(units) == 2
    units.keep_after(at(2))
    assert len(units) == 2
    units.keep_after(None)
    assert len(units) == 0
    units.keep_after(None)


def test_a_step_asks_nothing_of_all_that_are_recorded() -> None:
    """With a snapshot every ten thousand steps there are so many."""

    compared = 0

    class Counted:
        """A position that counts how often it is compared."""

        def __init__(self, step: int) -> None:
            self.step = step

        def __gt__(self, other: Position) -> bool:
            nonlocal compared
            compared += 1
            return self.step > other.step

        def __le__(self, other: Position) -> bool:
            return not self > other

    units = recorded(*(cast(Position, Counted(step)) for step in range(1, 10_001)))
    assert units.first_after(at(9_999)) is not None
    assert units.any_after(at(9_999))
    units.keep_after(at(0))
    assert compared <= 5
