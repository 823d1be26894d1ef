"""A rank that died without a word about its last unit: the next plan says whether that counts."""

from __future__ import annotations

import pytest

from rackrun.coordinator.observe.job_progress import UnreportedCommits
from rackrun.protocol.ids import Generation, Incarnation, Position, SlotId
from rackrun.protocol.wire import UnitSealed
from tests.coordinator.fakes import member, plan

BEFORE = plan(1, member(0, "tray-00/0", 1), member(1, "tray-00/4", 5))
AFTER = (member(0, "tray-00/0", 1), member(1, "tray-00/5", 6, fresh=True))


def sealed(step: int, slot: str = "tray-00/4", incarnation: int = 5) -> UnitSealed:
    return UnitSealed(
        slot=SlotId(slot),
        incarnation=Incarnation(incarnation),
        generation=Generation(1),
        at=Position(step),
        ids=b"8 bytes.",
    )


@pytest.fixture
def words() -> UnreportedCommits:
    words = UnreportedCommits()
    words.settle(BEFORE)
    return words


def test_a_committed_unit_counts_for_the_rank_that_the_worker_was(words: UnreportedCommits) -> None:
    words.record(sealed(7))
    (unit,) = words.settle(plan(2, *AFTER, committed=Position(7)))
    assert (unit.rank, unit.at, unit.generation, unit.ids) == (1, Position(7), 1, b"8 bytes.")


def test_a_unit_that_is_done_again_does_not_count(words: UnreportedCommits) -> None:
    words.record(sealed(7))
    assert words.settle(plan(2, *AFTER, committed=Position(6))) == []
    assert words.settle(plan(3, *AFTER, committed=Position(7))) == []


def test_a_unit_behind_which_the_world_goes_back_does_not_count(words: UnreportedCommits) -> None:
    words.record(sealed(7))
    assert words.settle(plan(2, *AFTER, committed=Position(7), rollback=5)) == []


def test_a_worker_that_was_no_rank_has_nothing_to_say(words: UnreportedCommits) -> None:
    words.record(sealed(7, "tray-00/6", 7))
    assert words.settle(plan(2, *AFTER, committed=Position(7))) == []


def test_a_worker_that_is_another_rank_by_now_has_done_it_as_the_rank_that_it_was(words: UnreportedCommits) -> None:
    words.settle(plan(2, member(0, "tray-00/4", 5), committed=Position(7)))
    words.record(sealed(7))
    (unit,) = words.settle(plan(3, member(0, "tray-00/6", 6, fresh=True), committed=Position(7)))
    assert (unit.rank, unit.generation) == (1, 1)
