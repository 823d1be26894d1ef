"""What travels with the gate of a Trainer's step, and when a step is done again for want of room."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rackrun.frameworks.hf import rank_results
from rackrun.frameworks.hf.rank_results import RankResults

pytestmark = pytest.mark.frameworks

RANKS = 2


class Ranks:
    """As many processes, each with attributes of its own, and the gate between them."""

    def __init__(self, may_change: tuple[bool, ...] = (True,) * RANKS) -> None:
        self.owns = [SimpleNamespace(may_change=may, changed=str) for may in may_change]
        run: Any = SimpleNamespace(world_size=len(may_change))
        self.results = [RankResults(run, own) for own in self.owns]  # type: ignore[arg-type]

    def step(self, entered: list[str], left: list[str]) -> tuple[int, bool, list[list[str]]]:
        """Do a step, and return how many numbers each rank has sent, whether it was refused, and what each has taken."""
        wanted = max(one.room_wanted(text) for one, text in zip(self.results, entered, strict=True))
        steps = [Gate() for _ in self.results]
        for result, own, text, step in zip(self.results, self.owns, left, steps, strict=True):
            own.changed = lambda text=text: text
            result.offer(step, [1.0, 2.0], wanted)  # type: ignore[arg-type]
        rows = [step.values for step in steps]
        assert len({len(row) for row in rows}) == 1, "all ranks send as many"
        answers = {bool(step.refuses and step.refuses(rows)) for step in steps}
        assert len(answers) == 1, "all ranks decide alike"
        for step in steps:
            step._gathered = rows
        refused = answers.pop()
        taken = [] if refused else [self._taken(*one) for one in zip(self.results, steps, strict=True)]
        return len(rows[0]), refused, taken

    @staticmethod
    def _taken(result: RankResults, step: Any) -> list[str]:
        return result.take(step)[1]


class Gate:
    """A step, as far as it goes here."""

    values: tuple[float, ...] = ()
    refuses: Callable[[Any], bool] | None = None
    _gathered: Any = None

    def _gather_with_gate(self, values: Any, refuses: Any = None) -> None:
        self.values, self.refuses = tuple(values), refuses


@pytest.fixture
def knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes know at once by how much attributes grow."""
    monkeypatch.setattr(rank_results, "_FIRST_STEPS", 0)


@pytest.mark.usefixtures("knows")
def test_each_rank_gets_the_attributes_of_all() -> None:
    assert Ranks().step(["", ""], ["a", "b"])[1:] == (False, [["a", "b"]] * 2)


@pytest.mark.usefixtures("knows")
def test_attributes_that_grow_steadily_are_refused_once_at_most() -> None:
    ranks, texts, refused = Ranks(), ["", ""], 0
    for number in range(8):
        left = [text + str(rank) * 400 for rank, text in enumerate(texts)]
        again = 0
        while ranks.step(texts, left)[1]:
            again += 1
        assert again <= 1
        refused += again
        assert not again or number == 0
        texts = left
    assert refused == 1


@pytest.mark.usefixtures("knows")
def test_a_script_without_attributes_of_its_own_sends_none() -> None:
    assert Ranks((False, False)).step(["", ""], ["", ""])[:2] == (2, False)


@pytest.mark.usefixtures("knows")
def test_ranks_with_other_callbacks_send_as_many_numbers() -> None:
    assert Ranks((True, False)).step(["x", ""], ["x", ""])[1:] == (False, [["x", ""]] * 2)


def test_in_its_first_steps_a_process_asks_for_a_collective_before_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know yet by how much the attributes grow, and a refused step would be done twice."""
    gathered = []

    def gather(_: RankResults, mine: list[float]) -> list[tuple[float, ...]]:
        gathered.append(mine)
        return [tuple(mine)] * RANKS

    monkeypatch.setattr(RankResults, "_gather", gather)
    ranks = Ranks()
    sent = [ranks.step(["", ""], ["same", "same"])[0] for _ in range(5)]
    assert [bool(count) for count in sent] == [False, False, False, True, True]
    assert len(gathered) == 3 * RANKS
