"""A rack as a picture: what a cell is can be read without colour."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path

from rich.console import Console

from rackrun.topology.drawing.placement_picture import Cell, cells, draw_svg, draw_text
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Clique, CliqueId, Rack, Topology
from rackrun.topology.placement.rank_assignment import Placement, place
from tests.topology.placements import AVOID, BAD, cut, joined, machine, tray

TWO = read_rack_file(Path(__file__).resolve().parents[3] / "examples" / "racks" / "two-gb200-nvl72.yaml")
HEALTH = {"a-1/0": AVOID, "a-1/1": BAD, "a-3/0": AVOID}


def small() -> tuple[Topology, Placement]:
    topology = joined(machine(4, 2))
    ready = [f"a-{at}" for at in range(3)] + ["a-3/0"]
    return topology, place(topology, Mesh.of({"dp": 3, "tp": 1}), preflighted=ready)


def plain(topology: Topology, *args: object, width: int = 100, **kwargs: object) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(draw_text(topology, *args, **kwargs))  # type: ignore[arg-type]
    return out.getvalue()


def test_a_cell_says_what_a_slot_is() -> None:
    topology, placed = small()
    found = cells(topology, placed, HEALTH, ["a-0/1"])
    assert {slot: cell.text for slot, cell in found.items()} == {
        "a-0/0": "0", "a-0/1": "lost", "a-1/0": "2!", "a-1/1": "bad",
        "a-2/0": "spare", "a-2/1": "spare", "a-3/0": "spare!", "a-3/1": "wait",
    }  # fmt: skip
    assert {cell.text for cell in cells(topology).values()} == {"·"}
    assert cells(topology, lost=["a-0"])["a-0/0"] == Cell("lost", "lost", "A")  # type: ignore[index]


def test_a_terminal_shows_trays_as_rows_and_gpus_as_cells() -> None:
    topology, placed = small()
    drawn = [line.split() for line in plain(topology, placed, HEALTH).splitlines()]
    assert ["rack", "a"] in drawn
    assert ["0", "a-0", "0", "1", "A"] in drawn
    assert ["1", "a-1", "2!", "bad", "A"] in drawn
    assert ["3", "a-3", "spare!", "wait", "A"] in drawn
    assert ["A", "clique", "a.1"] in drawn


def test_a_tray_in_two_cliques_says_which_gpu_is_in_which() -> None:
    one = tray("a", 0, 2)
    rack = Rack(serial="a", trays=(one, tray("a", 1, 1)))
    halves = [Clique(id=CliqueId("d", at), gpus=(gpu.uuid,)) for at, gpu in enumerate(one.gpus)]
    drawn = [line.split() for line in plain(Topology.of([rack], [*halves, cut("e", 0, rack.trays[1:])])).splitlines()]
    assert ["0", "a-0", "·", "·", "A", "B"] in drawn
    assert ["1", "a-1", "·", "C"] in drawn


def test_two_nvl72_stand_side_by_side_and_many_racks_are_cut_short() -> None:
    placed = place(TWO, Mesh.of({"pp": 2, "dp": 16, "tp": 4}), spares=8)
    drawn = plain(TWO, placed, width=130)
    assert any("rack 1825024170029" in line and "rack 1825024170030" in line for line in drawn.splitlines())
    assert all(f" {rank} " in drawn for rank in (0, 63, 64, 127))
    assert "... and 1 racks more" in plain(TWO, placed, racks_max=1)


def test_the_svg_is_well_formed_needs_nothing_else_and_has_every_cell() -> None:
    topology, placed = small()
    svg = draw_svg(topology, placed, HEALTH)
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "1", "2!", "bad", "spare", "spare!", "wait", "rack a"} <= set(texts)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(topology.seats)
    assert "a-1/0: rank 2!, clique A" in titles
    assert "href" not in svg
    assert draw_svg(topology, placed, HEALTH) == svg
    assert "and 1 racks more" in draw_svg(TWO, racks_max=1)


def test_names_are_escaped() -> None:
    rack = Rack(serial="<&>[red]", trays=(tray("[bold]", 0, 1),))
    root = ET.fromstring(draw_svg(Topology.of([rack])))
    assert "rack <&>[red]" in [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "[bold]-0" in plain(Topology.of([rack]))
    assert "rack <&>[red]" in plain(Topology.of([rack]))
