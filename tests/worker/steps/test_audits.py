"""Which steps are looked at more closely than others."""

from __future__ import annotations

import itertools

import pytest

from rackrun.worker.steps.audits import is_audited, is_looked_at


def test_the_first_steps_are_looked_at_and_what_is_audited() -> None:
    assert all(map(is_looked_at, range(1, 17)))
    assert all(is_looked_at(number) for number in range(1, 5000) if is_audited(number))


def test_one_of_eight_is_looked_at_and_at_least_one_of_thirteen() -> None:
    found = [number for number in range(17, 100_000) if is_looked_at(number)]
    assert max(after - before for before, after in itertools.pairwise(found)) <= 13
    assert len(found) == pytest.approx(100_000 / 8, rel=0.01)


@pytest.mark.parametrize("every", [2, 7, 8, 10, 16, 50, 64, 100, 1000])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_what_a_script_does_every_so_many_steps_meets_one_that_is_looked_at(every: int, at: int) -> None:
    looked_at = [
        number for number in range(1000 + at - 1000 % every, 1000 + 300 * every, every) if is_looked_at(number)
    ]
    assert looked_at
