"""A topology as numpy arrays, for the placement to compute on. Slots and cliques are numbers here."""

from __future__ import annotations

import itertools

import numpy as np

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.mesh import Ints
from rackrun.topology.model.racks import CliqueId, Rack, Topology

__all__ = ["PlacementArrays"]


class PlacementArrays:
    """A topology's arrays: made once for a topology, and never changed.

    Slots are numbered by chassis serial, tray index and GPU index. Cliques are numbered in the order of the fabric's
    tree, so that near cliques have near numbers.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        seats = topology.seats
        self.slots = [SlotId(seat.slot) for seat in seats]
        self.number = {slot: at for at, slot in enumerate(self.slots)}
        trays: dict[str, int] = {}
        racks: dict[str, int] = {}
        self.tray = np.array([trays.setdefault(seat.tray.name, len(trays)) for seat in seats], np.int64)
        self.rack = np.array([racks.setdefault(seat.rack.serial, len(racks)) for seat in seats], np.int64)
        self.tray_index = np.array([seat.tray.index for seat in seats], np.int64)
        self.tray_slots: dict[str, list[int]] = {name: [] for name in trays}
        first: dict[CliqueId, int] = {}
        for at, seat in enumerate(seats):
            first.setdefault(seat.clique, at)
            self.tray_slots[seat.tray.name].append(at)

        paths = _paths(topology)
        order = sorted(first, key=lambda clique: (paths[seats[first[clique]].rack.serial], first[clique]))
        self.cliques: tuple[CliqueId, ...] = tuple(order)
        numbers = {clique: at for at, clique in enumerate(order)}
        self.clique: Ints = np.array([numbers[seat.clique] for seat in seats], np.int64)
        """The clique of each slot: int64[slots]."""
        domains: dict[str, int] = {}
        self.domain: Ints = np.array([domains.setdefault(clique.domain, len(domains)) for clique in order], np.int64)
        """The NVLink domain of each clique: int64[cliques]."""
        by_clique = np.argsort(self.clique, kind="stable")
        self.sizes: Ints = np.bincount(self.clique, minlength=len(order))
        """How many slots each clique has: int64[cliques]."""
        self.members: list[Ints] = np.split(by_clique, np.cumsum(self.sizes)[:-1]) if order else []
        self.tiers: Ints = _tiers([paths[seats[first[clique]].rack.serial] for clique in order])
        """What each clique hangs on at each tier: int64[tiers, cliques].

        The tiers are the clique itself, its rack, the nearest switch, and so on.
        """

    def distance(self, one: Ints, other: Ints | int) -> Ints:
        """Return the fabric distance between cliques.

        It is 0 for the same clique, 1 within a rack, 2 under one switch, and 1 more for each tier up to a common one.

        ``one`` and ``other`` are clique numbers. A clique that spans racks counts as being where its first GPU is.
        """
        found: Ints = (self.tiers[:, one] != self.tiers[:, np.atleast_1d(other)]).sum(0)
        return found


def _paths(topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return each rack's path from the top of the fabric down to the rack.

    All paths have one length: a rack with fewer switches above it gets switches of its own.
    """
    depth = max((len(rack.fabric) for rack in topology.racks), default=0)

    def path(rack: Rack) -> tuple[str, ...]:
        own = tuple(f"\0{rack.serial}" for _ in range(depth - len(rack.fabric)))
        return (*reversed(rack.fabric), *own, rack.serial)

    return {rack.serial: path(rack) for rack in topology.racks}


def _tiers(paths: list[tuple[str, ...]]) -> Ints:
    depth = len(paths[0]) if paths else 0
    rows = [list(range(len(paths)))]
    for length in range(depth, 0, -1):
        ids: dict[tuple[str, ...], int] = {}
        counter = itertools.count()
        rows.append(
            [ids[key] if (key := path[:length]) in ids else ids.setdefault(key, next(counter)) for path in paths]
        )
    return np.array(rows, np.int64)
