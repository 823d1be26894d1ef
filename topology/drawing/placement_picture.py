"""Draw racks with the ranks placed on them, for a terminal and as SVG.

It is pure: the picture follows from a topology, a placement and known health. The text of a cell says what the cell is.
Colours only repeat the cliques' letters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rich.console import RenderableType

from rackrun.protocol.ids import SlotId
from rackrun.topology.drawing.rack_picture import Cell, CellStyle, LegendEntry, letters_of, svg, terminal
from rackrun.topology.model.racks import Topology
from rackrun.topology.placement.objective import Fitness
from rackrun.topology.placement.rank_assignment import Placement

__all__ = ["Cell", "cells", "draw_svg", "draw_text"]

_LOOKS = {
    "rank": CellStyle("bold {clique}", "#ffffff", dashed=False),
    "spare": CellStyle("{clique}", "#e5e7eb"),
    "free": CellStyle("{clique}", "#f9fafb"),
    "waiting": CellStyle("{clique}", "#f9fafb"),
    "lost": CellStyle("bold reverse", "#374151", "#ffffff"),
    "bad": CellStyle("bold reverse", "#374151", "#ffffff"),
}
"""The look of each `Cell.kind`. ``free``: there is no placement."""
_MEANINGS = (
    LegendEntry("12", "rank"),
    LegendEntry("spare", "healthy and ready"),
    LegendEntry("wait", "not preflighted"),
    LegendEntry("!", "on its way out"),
    LegendEntry("bad", "not to be used"),
    LegendEntry("lost", "does not answer"),
)


def cells(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
) -> dict[SlotId, Cell]:
    """Return the cell of each slot. ``health`` and ``lost`` name slots, or trays for all of their slots."""
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
    """Draw racks side by side as far as the terminal is wide, then a legend."""
    return terminal(topology, cells(topology, placement, health, lost), _LOOKS, _MEANINGS, racks_max=racks_max)


def draw_svg(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
    *,
    racks_max: int = 64,
) -> str:
    """Draw the same as one self-contained SVG document. Each cell has a tooltip."""
    return svg(topology, cells(topology, placement, health, lost), _LOOKS, _MEANINGS, racks_max=racks_max)
