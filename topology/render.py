"""Racks as pictures: for a terminal, and as SVG. Pure: from a topology, a placement and what is known of health.

A cell says in letters what it is; colour tells cliques apart a second time, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rackrun.core.ids import SlotId
from rackrun.topology.model import CliqueId, Rack, Topology
from rackrun.topology.objective import Fitness
from rackrun.topology.placement import Placement

__all__ = ["Cell", "cells", "draw_svg", "draw_text"]

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
_SVG_COLOURS = ("#0e7490", "#15803d", "#a21caf", "#b45309", "#1d4ed8", "#be123c")
_FILLS = {
    "rank": "#ffffff",
    "spare": "#e5e7eb",
    "free": "#f9fafb",
    "waiting": "#f9fafb",
    "lost": "#374151",
    "bad": "#374151",
}
_MEANINGS = (
    ("12", "rank"),
    ("spare", "healthy and ready"),
    ("wait", "not preflighted"),
    ("!", "on its way out"),
    ("bad", "not to be used"),
    ("lost", "does not answer"),
)
_WIDE, _HIGH, _LEFT, _TOP, _GAP = 46, 18, 96, 40, 24


class Cell(NamedTuple):
    kind: str
    """rank, spare, waiting, free (nothing is placed), bad or lost."""
    text: str
    """A rank's number, or a word; with ``!`` when the device is on its way out."""
    clique: str
    """A letter of the legend."""


def cells(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
) -> dict[SlotId, Cell]:
    """What each slot is. ``health`` and ``lost`` name slots, or trays for all of their slots."""
    health = health or {}
    letters = _letters(topology)
    ranks = placement.rank_on if placement else {}
    spares = frozenset(placement.spares) if placement else frozenset()
    found = {}
    for seat in topology.seats:
        slot = SlotId(seat.slot)
        fitness = max(health.get(slot, Fitness.USABLE), health.get(seat.tray.name, Fitness.USABLE))
        mark = "!" * (fitness == Fitness.AVOID)
        if slot in lost or seat.tray.name in lost:
            cell = ("lost", "lost")
        elif fitness == Fitness.BAD:
            cell = ("bad", "bad")
        elif slot in ranks:
            cell = ("rank", f"{ranks[slot]}{mark}")
        elif placement is None:
            cell = ("free", f"·{mark}")
        elif slot in spares:
            cell = ("spare", f"spare{mark}")
        else:
            cell = ("waiting", f"wait{mark}")
        found[slot] = Cell(*cell, letters[seat.clique])
    return found


def draw_text(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
    *,
    racks_max: int = 8,
) -> RenderableType:
    """Racks side by side as far as the terminal is wide: trays are rows, GPUs are cells; then what the letters mean."""
    found = cells(topology, placement, health, lost)
    shown = topology.racks[:racks_max]
    parts: list[RenderableType] = [Columns([_table(rack, found) for rack in shown], padding=(1, 3))]
    if len(topology.racks) > racks_max:
        parts.append(Text(f"... and {len(topology.racks) - racks_max} racks more", style="dim"))
    legend = Text()
    for clique, letter in _shown_letters(topology, shown):
        legend.append(f"{letter} ", style=f"bold {_colour(letter, _COLOURS)}").append(f"clique {clique}\n")
    for text, meaning in _MEANINGS:
        legend.append(f"{text}", style="bold").append(f" {meaning}   ")
    return Group(*parts, legend)


def draw_svg(
    topology: Topology,
    placement: Placement | None = None,
    health: Mapping[str, Fitness] | None = None,
    lost: Collection[str] = (),
    *,
    racks_max: int = 64,
) -> str:
    """The same as one SVG document that needs nothing from elsewhere. Each cell says more when pointed at."""
    found = cells(topology, placement, health, lost)
    shown = topology.racks[:racks_max]
    parts: list[str] = []
    x = _GAP
    high = 0
    for rack in shown:
        parts.append(_line(x, _TOP - 22, f"rack {rack.serial}", "bold"))
        for row, tray in enumerate(rack.trays):
            y = _TOP + row * (_HIGH + 4)
            parts.append(_line(x, y + 13, f"{tray.index:>2} {_short(tray.name)}", "normal"))
            for column, gpu in enumerate(tray.gpus):
                slot = SlotId(f"{tray.name}/{gpu.index}")
                parts.append(_box(x + _LEFT + column * (_WIDE + 4), y, slot, found[slot]))
        x += _LEFT + max(len(tray.gpus) for tray in rack.trays) * (_WIDE + 4) + _GAP
        high = max(high, len(rack.trays))
    y = _TOP + high * (_HIGH + 4) + 16
    legend = [f"{letter}: clique {clique}" for clique, letter in _shown_letters(topology, shown)]
    legend.append("   ".join(f"{text}: {meaning}" for text, meaning in _MEANINGS))
    if len(topology.racks) > racks_max:
        legend.append(f"and {len(topology.racks) - racks_max} racks more")
    parts += [_line(_GAP, y + 16 * at, text, "normal") for at, text in enumerate(legend)]
    x, y = max(x, 2 * _GAP + 7 * max(len(text) for text in legend)), y + 16 * len(legend)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{y}" viewBox="0 0 {x} {y}" '
        'font-family="ui-monospace, monospace" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{x}" height="{y}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _table(rack: Rack, found: Mapping[SlotId, Cell]) -> Table:
    table = Table(title=Text(f"rack {rack.serial}"), title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("tray", justify="right")
    table.add_column("name", overflow="fold")
    for index in range(max(len(tray.gpus) for tray in rack.trays)):
        table.add_column(f"{index}", justify="right")
    table.add_column("clique")
    for tray in rack.trays:
        row = [found[SlotId(f"{tray.name}/{gpu.index}")] for gpu in tray.gpus]
        letters = [cell.clique for cell in row]
        blanks = [Text("")] * (len(table.columns) - 3 - len(row))
        joined = letters[:1] if len({*letters}) <= 1 else letters
        table.add_row(f"{tray.index}", Text(tray.name), *map(_text, row), *blanks, Text(" ".join(joined)))
    return table


def _text(cell: Cell) -> Text:
    style = _colour(cell.clique, _COLOURS)
    match cell.kind:
        case "rank":
            style = f"bold {style}"
        case "bad" | "lost":
            style = "bold reverse"
        case _:
            pass
    return Text(cell.text, style=style)


def _box(x: int, y: int, slot: str, cell: Cell) -> str:
    colour = _colour(cell.clique, _SVG_COLOURS)
    dashed = ' stroke-dasharray="3 2"' if cell.kind != "rank" else ""
    ink = "#ffffff" if cell.kind in ("bad", "lost") else "#111827"
    said = f"rank {cell.text}" if cell.kind == "rank" else cell.text
    return (
        f"<g><title>{escape(slot)}: {escape(said)}, clique {cell.clique}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="3" fill="{_FILLS[cell.kind]}" stroke="{colour}" '
        f'stroke-width="1.5"{dashed}/>'
        f'<text x="{x + _WIDE // 2}" y="{y + 13}" text-anchor="middle" fill="{ink}">{escape(cell.text)}</text></g>'
    )


def _line(x: int, y: int, text: str, weight: str) -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" fill="#111827" xml:space="preserve">{escape(text)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= 11 else f"…{name[-10:]}"


def _letters(topology: Topology) -> dict[CliqueId, str]:
    """A to Z, AA to AZ, ... in the order in which cliques are met."""
    found: dict[CliqueId, str] = {}
    for seat in topology.seats:
        if seat.clique not in found:
            number, letters = len(found) + 1, ""
            while number:
                number, at = divmod(number - 1, 26)
                letters = chr(ord("A") + at) + letters
            found[seat.clique] = letters
    return found


def _shown_letters(topology: Topology, racks: Collection[Rack]) -> list[tuple[CliqueId, str]]:
    serials = {rack.serial for rack in racks}
    met = dict.fromkeys(seat.clique for seat in topology.seats if seat.rack.serial in serials)
    letters = _letters(topology)
    return [(clique, letters[clique]) for clique in met]


def _colour(letters: str, colours: tuple[str, ...]) -> str:
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - ord("A") + 1
    return colours[(number - 1) % len(colours)]
