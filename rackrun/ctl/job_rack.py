"""Display of a job on its rack for ``rackctl topology --run``: a picture, a rank's history, and problems."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rackrun.coordinator.report.rank_placement import RankPlacement
from rackrun.core.machine.state_replay import SlotStatus
from rackrun.protocol.ids import SlotId
from rackrun.topology.drawing.rack_picture import Cell, CellStyle, LegendEntry, letters_of, svg, terminal

__all__ = ["as_json", "draw_job", "draw_job_svg", "shape_of"]

_LOOKS = {
    "rank": CellStyle("green", "#dcfce7", dashed=False),
    "ready": CellStyle("cyan", "#cffafe"),
    "starting": CellStyle("cyan", "#ecfeff"),
    "nobody": CellStyle("bright_black", "#f9fafb"),
    "failing": CellStyle("bold yellow", "#fde68a"),
    "withheld": CellStyle("bold blue", "#bfdbfe"),
    "drained": CellStyle("bold white", "#e5e7eb"),
    "unfit": CellStyle("bold magenta", "#f5d0fe"),
    "quarantined": CellStyle("bold bright_red", "#fecaca"),
    "out": CellStyle("bold red", "#f87171"),
    "lost": CellStyle("bold reverse", "#374151", "#ffffff"),
}
_LETTERS = {"failing": "F", "withheld": "W", "unfit": "U", "quarantined": "Q", "drained": "D", "out": "X", "lost": "L"}
_MEANINGS = {
    "rank": ("12", "rank"),
    "ready": ("S", "spare, ready"),
    "starting": ("S…", "spare, starting"),
    "nobody": ("·", "nobody"),
    "failing": ("F", "failing: left when a better GPU is ready"),
    "withheld": ("W", "judged, and not acted on"),
    "unfit": ("U", "not to be taken into use now"),
    "drained": ("D", "drained, or about to be"),
    "quarantined": ("Q", "lost too many workers"),
    "out": ("X", "out of use"),
    "lost": ("L", "lost"),
}
_RACKS_MAX, _RACKS_MAX_SVG = 8, 64


def draw_job(found: RankPlacement) -> RenderableType:
    """Return the display for a terminal: the job in two lines, the racks, the legend, and a line for each GPU with a
    known fact."""
    cells = _cells(found)
    picture = terminal(found.past.topology(), cells, _LOOKS, _legend(found), racks_max=_RACKS_MAX, brief=True)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for one in found.known():
        letter = Text(_LETTERS.get(one.trouble, ""), style=_LOOKS[one.trouble].style if one.trouble else "")
        table.add_row(Text(one.slots), Text(one.who), letter, Text(one.why))
    head = [Text(found.run_id, style="bold").append(f"  {_state(found)}", style="not bold"), Text(shape_of(found))]
    below: list[RenderableType] = [Text(""), table] if table.row_count else []
    return Group(*head, Text(""), picture, *below)


def draw_job_svg(found: RankPlacement) -> str:
    """Return the picture of a job on its racks as SVG."""
    cells = _cells(found)
    lines = [f"{found.run_id}: {_state(found)}; {shape_of(found)}", *map(str, found.known())]
    return svg(found.past.topology(), cells, _LOOKS, _legend(found), racks_max=_RACKS_MAX_SVG, lines=lines)


def as_json(found: RankPlacement) -> dict[str, Any]:
    """Return a job's placement as values for JSON."""
    topology = found.past.topology()
    return {
        "run_id": found.run_id,
        "exit_code": found.exit_code,
        "because": found.because,
        "generation": found.past.generation,
        "mesh": dict(found.mesh.axes),
        "seats": [found.past.seats[rank] for rank in sorted(found.past.seats)],
        "slots": msgspec.to_builtins(list(found.standings.values())),
        "topology": msgspec.to_builtins(topology),
        "content_id": topology.content_id,
    }


def shape_of(found: RankPlacement) -> str:
    """Describe generation, ranks, mesh and spares."""
    past = found.past
    if not past.generation:
        return "no world was formed"
    mesh = ",".join(f"{name}={size}" for name, size in found.mesh.axes)
    spares = f", {found.spares_ready} of {past.spares_wanted} spares ready" if past.spares_wanted else ""
    return f"generation {past.generation}, {len(past.seats)} ranks ({mesh}){spares}"


def _state(found: RankPlacement) -> str:
    if found.exit_code is None:
        return "running, or killed"
    return f"ended with exit code {found.exit_code}: {found.because}"


def _cells(found: RankPlacement) -> dict[SlotId, Cell]:
    topology = found.past.topology()
    letters = letters_of(topology)
    seats = {SlotId(seat.slot): seat for seat in topology.seats}
    whos = {slot: _who(found.standings[slot]) for slot in seats}
    wide = max(map(len, whos.values()), default=1)
    return {
        slot: Cell(
            _kind(one := found.standings[slot]),
            f"{whos[slot]:>{wide}}{_LETTERS.get(one.trouble, ' ')}",
            letters[seat.clique],
            _said(one),
        )
        for slot, seat in seats.items()
    }


def _kind(one: SlotStatus) -> str:
    return one.trouble or ("rank" if one.rank is not None else one.spare or "nobody")


def _who(one: SlotStatus) -> str:
    if one.rank is not None:
        return f"{one.rank}"
    if one.spare:
        return "S" if one.spare == "ready" else "S…"
    return "" if one.trouble else "·"


def _said(one: SlotStatus) -> str:
    who = f"rank {one.rank}" if one.rank is not None else "spare" if one.spare else "nobody"
    return f"{who}, {one.trouble}: {one.why}" if one.trouble else who


def _legend(found: RankPlacement) -> list[LegendEntry]:
    """Return the meanings of the symbols that occur."""
    standings = found.standings.values()
    there = {kind for one in standings for kind in (_kind(one), _kind(msgspec.structs.replace(one, trouble="")))}
    if all(one.trouble or one.rank is not None or one.spare for one in standings):
        there.discard("nobody")
    return [LegendEntry(*said, _LOOKS[kind].style) for kind, said in _MEANINGS.items() if kind in there]
