"""Which slots train and which wait."""

from __future__ import annotations

import pytest

from rackrun.core.members.slot_order import natural, slot_order, split
from rackrun.protocol.ids import SlotId, TrayId


def trays(count: int, slots: int) -> dict[TrayId, int]:
    return {TrayId(f"tray-{number}"): slots for number in range(count)}


def test_trays_stand_in_natural_order() -> None:
    assert sorted(["tray-10", "tray-2", "b", "a1b10", "a1b9"], key=natural) == [
        "a1b9",
        "a1b10",
        "b",
        "tray-2",
        "tray-10",
    ]
    assert sorted([SlotId("t-10/0"), SlotId("t-2/11"), SlotId("t-2/2")], key=slot_order) == [
        "t-2/2",
        "t-2/11",
        "t-10/0",
    ]


def test_whole_trays_wait_as_long_as_two_still_train() -> None:
    ranks, spares = split(trays(18, 4), 8)
    assert spares == tuple(f"tray-{tray}/{index}" for tray in (16, 17) for index in range(4))
    assert len(ranks) == 64
    assert ranks[:5] == ("tray-0/0", "tray-0/1", "tray-0/2", "tray-0/3", "tray-1/0")


def test_what_is_no_whole_tray_is_spread_over_the_training_trays() -> None:
    ranks, spares = split(trays(2, 4), 4)
    assert ranks == ("tray-0/0", "tray-0/1", "tray-1/0", "tray-1/1")
    assert spares == ("tray-0/2", "tray-0/3", "tray-1/2", "tray-1/3")


def test_one_tray_holds_back_its_last_slot() -> None:
    assert split(trays(1, 5), 1)[1] == ("tray-0/4",)


def test_a_whole_tray_and_the_rest_spread_from_the_end() -> None:
    assert split(trays(4, 4), 6)[1] == ("tray-1/3", "tray-2/3", "tray-3/0", "tray-3/1", "tray-3/2", "tray-3/3")


@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("slots", range(1, 5))
def test_every_slot_trains_or_waits_and_none_does_both(count: int, slots: int) -> None:
    for spares in range(count * slots):
        training, waiting = split(trays(count, slots), spares)
        assert len(waiting) == spares
        assert len({*training, *waiting}) == count * slots
