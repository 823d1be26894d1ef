"""What is committed, and where state comes from: alone, and exhaustively for small worlds."""

from __future__ import annotations

from itertools import product

import pytest

from rackrun.core.generation.restore_plan import ParkReport, StatePlan, StoredSnapshots, committed, state_plan
from rackrun.protocol.ids import BEGIN, Incarnation, Position, Rank, SlotId, Step, TrayId


def report(passed: int, *snapshots: int, entered: int | None = None) -> ParkReport:
    steps = tuple(Step(step) for step in snapshots)
    return ParkReport(
        passed=Position(passed),
        entered=Position(passed if entered is None else entered),
        gate=(float(passed),),
        snapshots=steps,
    )


def kept(*steps: int) -> list[StoredSnapshots]:
    return [
        StoredSnapshots(
            tray=TrayId("a"),
            slot=SlotId("a/9"),
            incarnation=Incarnation(9),
            where="a:2/a/9/9",
            steps=tuple(Step(step) for step in steps),
        )
    ]


def plan(
    reports: dict[int, ParkReport],
    lost: dict[int, list[StoredSnapshots]] | None = None,
    *,
    classes: str = "",
    upto: int = 9,
    rollback_incomplete: bool = False,
) -> StatePlan | None:
    size = 1 + max([*reports, *(lost or {})])
    return state_plan(
        reports={Rank(rank): value for rank, value in reports.items()},
        kept={Rank(rank): value for rank, value in (lost or {}).items()},
        classes={Rank(rank): classes for rank in range(size)},
        world_size=size,
        upto=Position(upto),
        rollback_incomplete=rollback_incomplete,
    )


# -- committed ---------------------------------------------------------------------------------------------------------
def test_what_one_survivor_saw_pass_is_committed() -> None:
    reports = {Rank(0): report(4, entered=5), Rank(1): report(5)}
    assert committed(reports, BEGIN) == (Position(5), (5.0,))


def test_what_the_last_plan_committed_stays_committed() -> None:
    """Its only witness is lost before the others took the plan: they entered that gate, so they can follow."""
    assert committed({Rank(0): report(4, entered=5)}, Position(5), (5.0,)) == (Position(5), (5.0,))


def test_a_phase_is_later_than_its_step() -> None:
    late = ParkReport(passed=Position(5, 1), gate=(1.0,))
    assert committed({Rank(0): report(5), Rank(1): late}, BEGIN)[0] == Position(5, 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_whoever_is_lost_every_survivor_can_follow_the_verdict(world: int) -> None:
    """All worlds of up to four that a gate allows: everyone entered gate 1, some saw it pass and went on to gate 2."""
    standings = [(0, 1), (1, 1), (1, 2)]  # (passed, entered)
    for everyone in product(standings, repeat=world):
        for alive in product([True, False], repeat=world):
            survivors = {
                Rank(rank): report(passed, entered=entered)
                for rank, (passed, entered) in enumerate(everyone)
                if alive[rank]
            }
            if not survivors:
                continue
            position, gate = committed(survivors, Position(0))
            assert gate == (float(position.step),) or position == Position(0)
            for survivor in survivors.values():
                assert survivor.passed <= position <= survivor.entered


# -- state -------------------------------------------------------------------------------------------------------------
def test_a_lost_rank_copies_from_its_replicas() -> None:
    found = plan({0: report(9), 2: report(9)}, {1: []}, classes="all")
    assert found is not None
    assert (found.fresh, found.restores[0].sources, found.rollback) == ((1,), (0, 2), None)


def test_without_a_replica_all_go_back_to_the_newest_step_that_all_have() -> None:
    found = plan({0: report(9, 3, 6), 2: report(9, 6, 8)}, {1: kept(3, 6)})
    assert found is not None
    assert (found.fresh, found.restores[0].snapshot, found.rollback) == ((1,), "a:2/a/9/9", 6)


def test_without_a_common_step_only_a_new_start_helps() -> None:
    assert plan({0: report(9, 6)}, {1: kept(3)}) is None
    assert plan({0: report(9, 6)}, {1: []}) is None


def test_when_all_are_lost_their_snapshots_are_enough() -> None:
    found = plan({}, {0: kept(3, 6), 1: kept(6)}, upto=2)
    assert found is not None
    assert (found.fresh, found.rollback) == ((0, 1), 6)


def test_nobody_goes_back_to_what_is_not_committed() -> None:
    assert plan({0: report(4, 3, 5)}, {1: kept(5)}, upto=4) is None


def test_a_torn_rollback_is_followed_by_another_one() -> None:
    """One member has gone back to 3, the other has not: copying would mix them."""
    found = plan({0: report(3, 3), 1: report(9, 3, 6)}, {2: kept(3)}, rollback_incomplete=True)
    assert found is not None
    assert (found.fresh, found.rollback) == ((2,), 3)


def test_a_member_without_that_snapshot_is_fresh_once_more() -> None:
    found = plan({0: report(9, 6), 1: report(9)}, {1: kept(6), 2: kept(6)})
    assert found is not None
    assert (found.fresh, found.rollback) == ((1, 2), 6)


def test_a_member_that_cannot_have_entered_what_is_committed_is_replaced_by_a_copy() -> None:
    found = plan({0: report(9), 1: report(4, entered=5)}, classes="all")
    assert found is not None
    assert (found.fresh, found.restores[0].sources) == ((1,), (0,))


def test_every_small_world_is_restored_from_one_step() -> None:
    """Three ranks, each alive or not, with any of two snapshots, in any of two classes or none."""
    snapshots = [(), (3,), (6,), (3, 6)]
    for alive in product([True, False], repeat=3):
        for has in product(snapshots, repeat=3):
            for classes in product(["", "x", "y"], repeat=3):
                _check_world(alive, has, classes)


def _check_world(alive: tuple[bool, ...], has: tuple[tuple[int, ...], ...], classes: tuple[str, ...]) -> None:
    reports = {Rank(rank): report(9, *has[rank]) for rank in range(3) if alive[rank]}
    left = {Rank(rank): kept(*has[rank]) for rank in range(3) if not alive[rank]}
    named = {Rank(rank): name for rank, name in enumerate(classes)}
    found = state_plan(reports=reports, kept=left, classes=named, world_size=3, upto=Position(9))
    if found is None:
        assert not all(alive)
        return
    assert found.fresh == tuple(restore.rank for restore in found.restores)
    assert {rank for rank in range(3) if not alive[rank]} <= set(found.fresh)
    for restore in found.restores:
        assert bool(restore.sources) != bool(restore.snapshot)
        assert not set(restore.sources) & set(found.fresh)
        assert all(classes[source] == classes[restore.rank] != "" for source in restore.sources)
        assert not restore.snapshot or found.rollback in has[restore.rank]
    if found.rollback is not None:
        assert all(found.rollback in has[rank] for rank in range(3) if rank not in found.fresh)
