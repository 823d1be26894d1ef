"""Draw racks for a terminal and as SVG: trays are rows, GPUs are cells. The caller decides what a cell shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rackrun.pages.templates import render
from rackrun.protocol.ids import SlotId
from rackrun.topology.model.racks import CliqueId, Rack, Topology, Tray

__all__ = ["Cell", "CellStyle", "LegendEntry", "letters_of", "svg", "terminal"]

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")
_SVG_COLOURS = ("#0e7490", "#15803d", "#a21caf", "#b45309", "#1d4ed8", "#be123c")
_TEMPLATE = Path(__file__).with_name("rack_picture.svg.j2")
_TRAYS = 18
"""How many hosts take the space of one rack."""


class CellStyle(NamedTuple):
    """The style of one kind of cell."""

    style: str
    """Style in a terminal; ``{clique}`` stands for the colour of the cell's clique."""
    fill: str
    ink: str = "#111827"
    dashed: bool = True


class LegendEntry(NamedTuple):
    """A line of the legend."""

    text: str
    meaning: str
    style: str = "bold"


class Cell(NamedTuple):
    """What one slot shows."""

    kind: str
    """A key of the looks."""
    text: str
    clique: str
    """The clique's letter in the legend."""
    said: str = ""
    """The tooltip in the SVG; when empty, the text is used."""


def terminal(
    topology: Topology,
    cells: Mapping[SlotId, Cell],
    looks: Mapping[str, CellStyle],
    meanings: Sequence[LegendEntry],
    *,
    racks_max: int,
    brief: bool = False,
) -> RenderableType:
    """Draw racks side by side as far as the terminal is wide, then a legend.

    ``brief`` leaves out what is obvious: a tray's index where the tray's name ends in it, and cliques that are a whole
    rack or a single tray. If all racks have one host, the hosts are drawn in one table then.
    """
    hosts = brief and len(topology.racks) > 1 and all(len(rack.trays) == 1 for rack in topology.racks)
    shown = topology.racks[: racks_max * (_TRAYS if hosts else 1)]
    cliques = _shown_letters(topology, shown)
    rows = _rows(shown, cells)
    single = brief and (len(cliques) == 1 or (_whole(rows) and len(cliques) == len(rows)))
    drawn = [Rack(serial="", trays=_by_name(shown))] if hosts else shown
    parts: list[RenderableType] = [
        Columns([_table(rack, cells, looks, brief, single) for rack in drawn], padding=(1, 3))
    ]
    if len(topology.racks) > len(shown):
        parts.append(Text(f"... and {len(topology.racks) - len(shown)} racks more", style="dim"))
    legend = Text()
    if brief and len(cliques) == 1 and topology.cliques:
        legend.append(f"all in clique {cliques[0][0]}\n")
    elif single and topology.cliques:
        legend.append("each tray is a clique\n")
    elif not single:
        for clique, letter in cliques:
            legend.append(f"{letter} ", style=f"bold {_colour(letter, _COLOURS)}").append(f"clique {clique}\n")
    said = [
        Text(text, style=style).append(f" {meaning}", style="not bold not reverse") for text, meaning, style in meanings
    ]
    legend.rstrip()
    return Group(*parts, *([legend] if legend else []), Columns(said, padding=(0, 3)))


def svg(
    topology: Topology,
    cells: Mapping[SlotId, Cell],
    looks: Mapping[str, CellStyle],
    meanings: Sequence[LegendEntry],
    *,
    racks_max: int,
    lines: Sequence[str] = (),
) -> str:
    """Draw the racks as one self-contained SVG document. Each cell has a tooltip. ``lines``: text below the legend."""
    shown = topology.racks[:racks_max]
    legend = [f"{letter}: clique {clique}" for clique, letter in _shown_letters(topology, shown)]
    legend.append("   ".join(f"{text}: {meaning}" for text, meaning, _ in meanings))
    if len(topology.racks) > racks_max:
        legend.append(f"and {len(topology.racks) - racks_max} racks more")
    return render(
        _TEMPLATE,
        racks=shown,
        legend=[*legend, *lines],
        cells=cells,
        looks=looks,
        colour=lambda letters: _colour(letters, _SVG_COLOURS),
    )


def letters_of(topology: Topology) -> dict[CliqueId, str]:
    """Return a letter for each clique: A to Z, AA to AZ, ... in the order of the slots."""
    found: dict[CliqueId, str] = {}
    for seat in topology.seats:
        if seat.clique not in found:
            number, letters = len(found) + 1, ""
            while number:
                number, at = divmod(number - 1, 26)
                letters = chr(ord("A") + at) + letters
            found[seat.clique] = letters
    return found


def _table(
    rack: Rack, cells: Mapping[SlotId, Cell], looks: Mapping[str, CellStyle], brief: bool, single: bool
) -> Table:
    rows = _rows([rack], cells)
    letters = {cell.clique for row in rows for cell in row}
    numbered = not brief or (bool(rack.serial) and not all(tray.name.endswith(f"{tray.index}") for tray in rack.trays))
    title = f"rack {rack.serial}" if rack.serial else "trays"
    lettered = not brief or (len(letters) > 1 and not single)
    if brief and len(letters) == 1 and not single:
        title = f"{title} · {next(iter(letters))}"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    if numbered:
        table.add_column("tray", justify="right")
    table.add_column("name" if numbered else "tray", overflow="fold")
    columns = max(len(tray.gpus) for tray in rack.trays)
    for index in range(columns):
        table.add_column(f"{index:>{_width(rows)}}" if brief else f"{index}", justify="left" if brief else "right")
    if lettered:
        table.add_column("clique")
    for tray, row in zip(rack.trays, rows, strict=True):
        first = [f"{tray.index}"] if numbered else []
        blanks = [Text("")] * (columns - len(row))
        of_row = [cell.clique for cell in row]
        joined = of_row[:1] if len({*of_row}) <= 1 else of_row
        last = [Text(" ".join(joined))] if lettered else []
        table.add_row(*first, Text(tray.name), *(_text(cell, looks[cell.kind]) for cell in row), *blanks, *last)
    return table


def _width(rows: Sequence[Sequence[Cell]]) -> int:
    """Return the width of the widest cell, without its last letter."""
    return max((len(cell.text) for row in rows for cell in row), default=2) - 1


def _rows(racks: Collection[Rack], cells: Mapping[SlotId, Cell]) -> list[list[Cell]]:
    return [[cells[SlotId(f"{tray.name}/{gpu.index}")] for gpu in tray.gpus] for rack in racks for tray in rack.trays]


def _whole(rows: Sequence[Sequence[Cell]]) -> bool:
    """Whether no tray is divided into several cliques."""
    return all(len({cell.clique for cell in row}) <= 1 for row in rows)


def _by_name(racks: Collection[Rack]) -> tuple[Tray, ...]:
    return tuple(sorted((tray for rack in racks for tray in rack.trays), key=lambda tray: (len(tray.name), tray.name)))


def _text(cell: Cell, look: CellStyle) -> Text:
    return Text(cell.text, style=look.style.format(clique=_colour(cell.clique, _COLOURS)))


def _shown_letters(topology: Topology, racks: Collection[Rack]) -> list[tuple[CliqueId, str]]:
    serials = {rack.serial for rack in racks}
    met = dict.fromkeys(seat.clique for seat in topology.seats if seat.rack.serial in serials)
    letters = letters_of(topology)
    return [(clique, letters[clique]) for clique in met]


def _colour(letters: str, colours: tuple[str, ...]) -> str:
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - ord("A") + 1
    return colours[(number - 1) % len(colours)]
