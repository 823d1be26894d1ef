"""A small rack to break: two cliques of two trays, three slots on each, a spare on every other tray."""

from __future__ import annotations

import pytest

from rackrun.chaos.faults.targets import Scene, SlotOccupant


@pytest.fixture
def scene() -> Scene:
    """Ranks 0 to 9; t1/2 and t3/2 wait. t0 and t1 are in clique A, t2 and t3 in B; each tray's snapshots are kept by the next."""
    places, rank = [], 0
    for tray in range(4):
        for slot in range(3):
            waits = slot == 2 and tray % 2 == 1
            places.append(
                SlotOccupant(f"t{tray}/{slot}", f"t{tray}", "AABB"[tray], "rack", None if waits else rank),
            )
            rank += not waits
    return Scene(tuple(places), {f"t{tray}": f"t{(tray + 1) % 4}" for tray in range(4)})
