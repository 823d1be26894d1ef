"""What is known of the world as it stands: its size, and which state is to be trusted."""

from __future__ import annotations

import pytest

from rackrun.core.generation.world import World
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Worker
from rackrun.protocol.events import WorkerParked
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId


def world(*good: int | None, doubted: bool = True) -> World:
    """Of members that have parked, and know all replicas to have been equal after these steps; -1: who has not parked yet."""
    made = World(doubted=doubted)
    for number, step in enumerate(good):
        slot, incarnation = SlotId(f"a/{number}"), Incarnation(number)
        record = WorkerRecord(worker=Worker(slot, incarnation), rank=Rank(number))
        if step != -1:
            known = None if step is None else Position(step)
            record.parked = WorkerParked(slot=slot, incarnation=incarnation, generation=Generation(2), good=known)
        made.members[Rank(number)] = record
    return made


@pytest.mark.parametrize(
    ("good", "trusted"), [((3, 5), 5), ((5, 3), 5), ((None, 4), 4), ((-1, 4), 4), ((None, None), None), ((), None)]
)
def test_in_doubt_that_is_trusted_which_any_member_knows_to_be_good(
    good: tuple[int | None, ...], trusted: int | None
) -> None:
    doubted = world(*good)
    doubted.doubt()
    assert doubted.trusted == (None if trusted is None else Position(trusted))


def test_what_is_trusted_stays_and_without_doubt_it_is_all() -> None:
    sure = world(3, doubted=False)
    sure.doubt()
    assert sure.trusted is None
    known = world(5)
    known.trusted = BEGIN
    known.doubt()
    assert known.trusted == BEGIN
    known.trust()
    assert known.trusted is None
    assert not known.doubted
    assert not known.unsure


def test_it_grows_by_itself_to_what_it_began_with_unless_a_person_wants_fewer() -> None:
    assert World(full=4).most == 4
    assert World(full=4, wanted=3).most == 3
    assert World(full=4, wanted=6).most == 4


def test_generations_are_counted() -> None:
    counted = World()
    assert [counted.next_generation(), counted.next_generation()] == [1, 2]
    assert counted.generation == 2
