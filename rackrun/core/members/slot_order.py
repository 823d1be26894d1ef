"""Order of slots, and which slots train and which hold spares when a world is formed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from rackrun.protocol.ids import SlotId, TrayId, slot_id

__all__ = ["natural", "slot_order", "split"]


_PARTS = re.compile("[0-9]+|[^0-9]")


@lru_cache(maxsize=1 << 16)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``tray-2`` before ``tray-10``."""
    parts = _PARTS.findall(name + "\0")
    return tuple([(1, 0, part) if part[0] not in "0123456789" else (0, int(part), part) for part in parts])


def slot_order(slot: SlotId) -> tuple[tuple[tuple[int, int, str], ...], int]:
    """Return the sort key of a slot: its tray in natural order, then its index."""
    tray, _, index = slot.rpartition("/")
    return natural(tray), int(index)


def split(trays: Mapping[TrayId, int], spares: int) -> tuple[tuple[SlotId, ...], tuple[SlotId, ...]]:
    """Return the slots that train, in the order of their ranks, and the slots that hold spares.

    ``trays`` gives the number of slots of each tray. Whole trays hold spares, from the last tray on, as long as two
    trays still train: a lost tray is then replaced by a whole one, in one NVLink domain. The remaining spares are
    spread over the training trays from the last on, in each tray's last slot first, so that a lost rank finds a spare
    on its own tray.
    """
    assert 0 <= spares < sum(trays.values()), "checked by the caller"
    order = sorted(trays, key=natural)
    training = {tray: trays[tray] for tray in order}
    left = spares
    while len(training) > 2 and left >= training[last := tuple(training)[-1]]:
        left -= training.pop(last)
    while left:
        left = _spread(training, left)
    ranks = [slot_id(tray, index) for tray, count in training.items() for index in range(count)]
    taken = frozenset(ranks)
    waiting = [slot_id(tray, i) for tray in order for i in range(trays[tray]) if slot_id(tray, i) not in taken]
    return tuple(ranks), tuple(waiting)


def _spread(training: dict[TrayId, int], left: int) -> int:
    """Take one slot of each tray out of training, from the last tray on; return how many are still to be taken out."""
    for tray in reversed(tuple(training)):
        if left and training[tray]:
            training[tray] -= 1
            left -= 1
    return left
