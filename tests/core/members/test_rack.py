"""Trays, their slots, and what is put where: the store, the copies of snapshots, the seats of a new start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rackrun.core.members.rack import RackMachine
from rackrun.protocol.events import TrayJoined
from rackrun.protocol.ids import Rank, SlotId, TrayId


def rack(trays: str, *, slots: int = 1, hosts: Mapping[str, str] | None = None, store: str = "") -> RackMachine:
    """Trays of one letter each, on the host of that name. ``store``: the one that all of them offer."""
    made = RackMachine()
    for tray in trays:
        made.join(joined(tray, slots=slots, host=(hosts or {}).get(tray, tray), store=store))
    return made


def joined(tray: str, *, slots: int = 1, host: str = "", store: str = "") -> TrayJoined:
    at = store or f"{tray}:1"
    return TrayJoined(tray=TrayId(tray), host=host or tray, slots=slots, store=at, snapshots=f"{tray}:2")


def goes_away(of: RackMachine, *trays: str) -> None:
    for tray in trays:
        of.depart(TrayId(tray), "preempted")


def mirrors(of: RackMachine) -> dict[str, str]:
    return {str(tray): where for tray, where in of.mirrors().items()}


def seats(of: RackMachine, **wanted: Any) -> dict[int, str] | None:
    """``r0="a/0"``: where rank 0 was."""
    found = of.seats({Rank(int(name[1:])): SlotId(slot) for name, slot in wanted.items()})
    return None if found is None else {int(rank): str(slot) for rank, slot in found.items()}


# -- the store
def test_the_store_stays_where_it_is_while_a_tray_of_it_stays() -> None:
    assert rack("abc").store() == "a:1"
    assert rack("abc").store("b:1") == "b:1"
    assert rack("ac").store("b:1") == "a:1", "its tray is lost"


def test_a_store_that_several_trays_share_stays_while_one_of_them_does() -> None:
    shared = rack("ab", store="x:1")
    shared.join(joined("c"))
    goes_away(shared, "a")
    assert shared.store("x:1") == "x:1"
    goes_away(shared, "b")
    assert shared.store("x:1") == "c:1"


def test_where_all_trays_go_the_store_stays() -> None:
    going = rack("ab")
    goes_away(going, "a", "b")
    assert going.store("b:1") == "b:1"
    assert going.store() == "a:1"


def test_a_store_that_was_tried_in_vain_is_the_last_choice_and_one_that_nobody_is_seated_on_the_first() -> None:
    assert rack("abc").store("a:1", tried={"a:1"}) == "b:1"
    assert rack("abc").store("a:1", tried={"a:1"}, seated={TrayId("b")}) == "c:1"
    assert rack("ab").store("a:1", tried={"a:1", "b:1"}) == "a:1", "there is no other"
    assert RackMachine().store() == ""


# -- copies
def test_each_tray_copies_to_the_next_and_the_last_to_the_first() -> None:
    assert mirrors(rack("abc")) == {"a": "b:2/b", "b": "c:2/c", "c": "a:2/a"}
    assert mirrors(rack("a")) == {}
    assert mirrors(RackMachine()) == {}


def test_a_tray_on_another_host_is_preferred() -> None:
    assert mirrors(rack("abcd", hosts={"a": "x", "b": "x", "c": "y", "d": "y"})) == {
        "a": "c:2/c",
        "b": "c:2/c",
        "c": "a:2/a",
        "d": "a:2/a",
    }
    assert mirrors(rack("ab", hosts={"a": "x", "b": "x"})) == {"a": "b:2/b", "b": "a:2/a"}, "better than none"


def test_nothing_is_copied_to_a_tray_that_goes() -> None:
    going = rack("abc")
    goes_away(going, "b")
    assert mirrors(going) == {"a": "c:2/c", "b": "c:2/c", "c": "a:2/a"}
    goes_away(going, "c")
    assert mirrors(going) == {"b": "a:2/a", "c": "a:2/a"}


# -- what is withdrawn
def test_a_tray_goes_when_all_its_slots_are_withdrawn() -> None:
    two = rack("ab", slots=2)
    two.drain([SlotId("a/0")], "by hand")
    assert not two.goes(TrayId("a"))
    assert (two.withdrawn(SlotId("a/0")), two.withdrawn(SlotId("a/1"))) == ("by hand", "")
    two.drain([SlotId("a/1")], "by hand")
    assert two.goes(TrayId("a"))
    assert [str(slot) for slot in two.free_slots()] == ["b/0", "b/1"]
    two.give_back([SlotId("a/0")])
    assert not two.goes(TrayId("a"))
    goes_away(two, "b")
    assert two.withdrawn(SlotId("b/1")) == "preempted"
    assert [str(slot) for slot in two.free_slots()] == ["a/0"]
    two.lose_tray(TrayId("b"), "lease lapsed")
    two.join(joined("b", slots=2))
    assert not two.goes(TrayId("b")), "another agent is there now"


def test_a_tray_without_slots_holds_nothing_that_is_to_last() -> None:
    assert rack("a", slots=0).goes(TrayId("a"))


def test_a_lost_tray_that_returns_is_remembered_with_its_slots_unless_it_was_to_go() -> None:
    two = rack("abc", slots=2)
    goes_away(two, "c")
    for tray in "abc":
        assert two.lose_tray(TrayId(tray), "gone", returns=tray != "b") == []
    assert two.returning == {"a": 2}
    two.join(joined("a"))
    assert not two.returning


# -- a new start
def test_each_rank_begins_where_it_was_and_whoever_has_lost_its_slot_on_a_free_one() -> None:
    assert seats(rack("ab", slots=2), r0="a/0", r1="b/1") == {0: "a/0", 1: "b/1"}
    assert seats(rack("ab", slots=2), r0="c/0", r1="a/0", r2="c/1") == {0: "a/1", 1: "a/0", 2: "b/0"}
    assert seats(rack("a", slots=2), r0="a/0", r1="b/0", r2="b/1") is None, "one slot is missing"
    assert seats(rack("a", slots=2), r0="b/0", r1="b/1") == {0: "a/0", 1: "a/1"}, "just enough"


def test_nobody_begins_on_a_slot_that_is_withdrawn() -> None:
    two = rack("ab")
    two.drain([SlotId("a/0")], "by hand")
    assert seats(two, r0="a/0") == {0: "b/0"}
    assert seats(two, r0="a/0", r1="b/0") is None
