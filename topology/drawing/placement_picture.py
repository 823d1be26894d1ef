"""A rack and who would sit on it, as a picture: for a terminal, and as SVG. Pure: from a topology, a placement and what is known of health.

A cell says in letters what it is; colour tells cliques apart a second time, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rich.console import RenderableType

from rackrun.protocol.ids import SlotId
from rackrun.topology.drawing.rack_picture import Cell, Look, Meaning, letters_of, svg, terminal
from rackrun.topology.model.racks import Topology
from rackrun.topology.placement.objective import Fitness
from rackrun.topology.placement.rank_assignment import Placement

__all__ = ["Cell", "cells", "draw_svg", "draw_text"]

_LOOKS = {
    "rank": Look("bold {clique}", "#ffffff", dashed=False),
    "spare": Look("{clique}", "#e5e7eb"),
    "free": Look("{clique}", "#f9fafb"),
    "waiting": Look("{clique}", "#f9fafb"),
    "lost": Look("bold reverse", "#374151", "#ffffff"),
    "bad": Look("bold reverse", "#374151", "#ffffff"),
}
"""By `Cell.kind`; ``free``: nothing is placed."""
_MEANINGS = (
    Meaning("12", "rank"),
    Meaning("spare", "healthy and ready"),
    Meaning("wait", "not preflighted"),
    Meaning("!", "on its way out"),
    Meaning("bad", "not to be used"),
    Meaning("lost", "does not answer"),
)


def cells(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
) -> dict[SlotId, Cell]:
    """What each slot is. ``health`` and ``lost`` name slots, or trays for all of their slots."""
    health = health or {}
    letters = letters_of(topology)
    ranks = placement.rank_on if placement else {}
    spares = frozenset(placement.spares) if placement else frozenset()
    found = {}
    for seat in topology.seats:
        slot = SlotId(seat.slot)
        fitness = max(health.get(slot, Fitness.USABLE), health.get(seat.tray.name, Fitness.USABLE))
        mark = "!" * (fitness == Fitness.AVOID)
        said = ""
        if slot in lost or seat.tray.name in lost:
            cell = ("lost", "lost")
        elif fitness == Fitness.BAD:
            cell = ("bad", "bad")
        elif slot in ranks:
            cell = ("rank", f"{ranks[slot]}{mark}")
            said = f"rank {cell[1]}"
        elif placement is None:
            cell = ("free", f"·{mark}")
        elif slot in spares:
            cell = ("spare", f"spare{mark}")
        else:
            cell = ("waiting", f"wait{mark}")
        found[slot] = Cell(*cell, letters[seat.clique], said)
    return found


def draw_text(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
    *,
    racks_max: int = 8,
) -> RenderableType:
    """Racks side by side as far as the terminal is wide, then what the letters mean."""
    return terminal(topology, cells(topology, placement, health, lost), _LOOKS, _MEANINGS, racks_max=racks_max)


def draw_svg(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
    *,
    racks_max: int = 64,
) -> str:
    """The same as one SVG document that needs nothing from elsewhere. Each cell says more when pointed at."""
    return svg(topology, cells(topology, placement, health, lost), _LOOKS, _MEANINGS, racks_max=racks_max)
