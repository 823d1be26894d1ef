"""A process that gets a rank later than its script has asked whether it is main: what was right then may be wrong now, and is said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rackrun.worker.script.rank_changes import RankChangeHooks


class Asked:
    """A script's process, whose place changes."""

    def __init__(self) -> None:
        self.place = (3, 4)
        self.places = RankChangeHooks(lambda: self.place)

    def goes_on(self, rank: int, size: int = 4) -> None:
        self.place = (rank, size)
        self.places.run_callbacks()


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_who_was_told_that_it_is_not_main_and_takes_rank_0_is_told_where(
    asked: Asked, capfd: pytest.CaptureFixture[str]
) -> None:
    asked.places.asked_for_main(is_main=False)
    asked.goes_on(2)
    assert not capfd.readouterr().err
    asked.goes_on(0)
    said = capfd.readouterr().err
    assert "test_rank_changes.py:" in said
    assert "this process has taken rank 0, and run.is_main was False" in said


def test_whoever_has_a_place_when_it_asks_is_told_nothing_later(
    asked: Asked, capfd: pytest.CaptureFixture[str]
) -> None:
    asked.goes_on(2)
    asked.places.asked_for_main(is_main=False)
    asked.goes_on(0)
    assert not capfd.readouterr().err


def test_whoever_has_a_callback_makes_it_anew_and_is_told_nothing(
    asked: Asked, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks: list[int] = []
    asked.places.on_join(lambda: ranks.append(asked.place[0]))
    assert ranks == [], "it has no place yet"
    asked.places.asked_for_main(is_main=False)
    asked.goes_on(2)
    asked.goes_on(2)
    asked.goes_on(0)
    assert ranks == [2, 0], "when the place is another one"
    asked.places.on_join(lambda: ranks.append(9))
    assert ranks == [2, 0, 9], "at once, where there is a place"
    assert not capfd.readouterr().err


def test_what_a_callback_draws_leaves_the_scripts_random_numbers_as_they_were(asked: Asked) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002 - what scripts use

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    expected = draws()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])
    drawn: list[tuple[float, float, float]] = []
    asked.places.on_join(lambda: drawn.append(draws()))
    asked.goes_on(1)
    assert drawn == [expected]
    assert draws() == expected
