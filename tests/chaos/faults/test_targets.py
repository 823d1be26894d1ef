"""Whom a symbol means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rackrun.chaos.base.errors import NoTarget, PlanError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.targets import (
    BuddyOf,
    Exactly,
    Last,
    Majority,
    Minority,
    NeighbourOf,
    One,
    Scene,
    Several,
    Subject,
    Target,
    resolve,
)

RANK, SPARE, TRAY = Subjects.RANK, Subjects.SPARE, Subjects.TRAY


def names(target: Target, scene: Scene, seed: int = 0) -> list[str]:
    return [subject.name for subject in resolve(target, scene, stream(seed, "test"))]


def test_every_rank_and_no_spare_is_meant_by_one_rank_sooner_or_later(scene: Scene) -> None:
    assert {names(One(RANK), scene, seed)[0] for seed in range(200)} == {str(rank) for rank in range(10)}
    assert {names(One(SPARE), scene, seed)[0] for seed in range(50)} == {"t1/2", "t3/2"}


@pytest.mark.parametrize(("ranks", "minority", "majority"), [(10, 4, 6), (3, 1, 2), (2, 0, 2), (1, 0, 1)])
def test_a_minority_is_less_than_half_and_a_majority_more(
    ranks: int, minority: int, majority: int, scene: Scene
) -> None:
    few = Scene(tuple(place for place in scene.places if place.rank is not None and place.rank < ranks))
    assert len(names(Majority(RANK), few)) == majority
    if minority:
        assert len(names(Minority(RANK), few)) == minority
    else:
        with pytest.raises(NoTarget):
            names(Minority(RANK), few)


def test_several_are_different_ones_in_order(scene: Scene) -> None:
    found = names(Several(TRAY, 3), scene)
    assert found == sorted(set(found))
    assert len(found) == 3
    with pytest.raises(NoTarget, match=r"5 tray\(s\) were to be struck, and there are 4"):
        names(Several(TRAY, 5), scene)


def test_a_neighbour_of_a_rank_is_on_its_tray_or_else_in_its_clique(scene: Scene) -> None:
    near = {names(NeighbourOf(Exactly(RANK, ("0",))), scene, seed)[0] for seed in range(50)}
    assert near == {"1", "2"}
    alone = Scene(tuple(place for place in scene.places if place.rank not in (1, 2)))
    assert {names(NeighbourOf(Exactly(RANK, ("0",))), alone, seed)[0] for seed in range(50)} == {"3", "4"}


def test_a_neighbour_of_a_tray_is_in_its_clique(scene: Scene) -> None:
    assert names(NeighbourOf(Exactly(TRAY, ("t2",))), scene) == ["t3"]


def test_a_buddy_is_who_keeps_the_snapshots(scene: Scene) -> None:
    assert names(BuddyOf(Exactly(TRAY, ("t3",))), scene) == ["t0"]
    assert set(names(BuddyOf(Exactly(RANK, ("0",))), scene)) <= {"3", "4"}
    with pytest.raises(NoTarget, match="nobody keeps the snapshots of tray t0"):
        names(BuddyOf(Exactly(TRAY, ("t0",))), replace(scene, buddies={}))
    with pytest.raises(PlanError):
        names(BuddyOf(Exactly(SPARE, ("t1/2",))), scene)


def test_the_last_is_the_last_of_its_kind(scene: Scene) -> None:
    struck = (Subject(TRAY, "t1"), Subject(RANK, "3"), Subject(TRAY, "t2"), Subject(RANK, "4"))
    assert names(Last(TRAY), replace(scene, struck=struck)) == ["t2"]
    with pytest.raises(NoTarget):
        names(Last(SPARE), replace(scene, struck=struck))


def test_who_is_gone_is_no_target_but_a_tray_may_be_meant_because_it_is_gone(scene: Scene) -> None:
    with pytest.raises(NoTarget, match="there is no rank 10 now"):
        names(Exactly(RANK, ("10",)), scene)
    assert names(Exactly(TRAY, ("t9",)), scene) == ["t9"]
