"""Which places of a mesh go: those with the rank that is best spared, and of equal ones the last."""

from __future__ import annotations

from rackrun.core.placement.mesh_resize import places, spared
from rackrun.protocol.ids import Rank

DP_BY_TP = (("dp", 3), ("tp", 2))


def goes(worth: dict[int, int], left: int, at: int = 0) -> list[int]:
    return [int(rank) for rank in spared(DP_BY_TP, at, lambda rank: worth.get(rank, 0), left)]


def test_a_place_is_judged_by_the_one_that_is_best_spared() -> None:
    assert goes({1: 5, 2: 1, 3: 1}, left=2) == [0, 1]
    assert goes({1: 5, 2: 1, 3: 1}, left=1) == [0, 1, 2, 3]


def test_of_equal_places_the_last_go() -> None:
    assert goes({}, left=2) == [4, 5]
    assert goes({}, left=3) == []
    assert goes({4: 1}, left=1, at=1) == [0, 2, 4]


def test_where_ranks_are_along_an_axis() -> None:
    assert places(DP_BY_TP, 0, [Rank(0), Rank(1), Rank(5)]) == {0, 2}
    assert places(DP_BY_TP, 1, [Rank(0), Rank(4)]) == {0}
