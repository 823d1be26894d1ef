"""``rackctl topology``: shows a rack, described or found, or with a job on it, and which rank is or would be where, and
why.

With a rack file, the rack is the file's; with ``--run``, the racks are a run's, from its journal; otherwise the rack is
this machine, from its driver. Exit codes: 0 all is well; 1 something is not as it should be; 2 bad usage.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rackrun.coordinator.report.rank_placement import RankPlacement, read_placement
from rackrun.ctl.job_rack import as_json as job_as_json
from rackrun.ctl.job_rack import draw_job, draw_job_svg, shape_of
from rackrun.errors import UsageError
from rackrun.launch.run.run_directory import find_run
from rackrun.topology.drawing.placement_picture import draw_svg, draw_text
from rackrun.topology.gpu_driver.nvml_watch import read_once
from rackrun.topology.gpu_driver.readings import NvmlUnavailable
from rackrun.topology.health.findings import preflight
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.mesh import BOUND, Mesh
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Topology
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.rank_assignment import Placement, place_first
from rackrun.topology.sources.discover import discover
from rackrun.topology.sources.partial_topology import merge

__all__ = ["topology"]

topology = typer.Typer(
    name="topology",
    help="Show and check racks. NVLink domains, GPU health, and which rank sits where.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_FILE = typer.Argument(
    metavar="[FILE | RUN]",
    help="A rack file. Default: this machine, as its GPU driver reports it. With --run: directory or id of a run; default: the newest run.",
    show_default=False,
)
File = Annotated[Path | None, _FILE]
MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh", metavar="AXIS=SIZE,..", help="Mesh, the fastest axis last: pp=2,dp=-1,tp=4. -1: as many as fit."
    ),
]
Spares = Annotated[int, typer.Option("--spares", min=0, help="Number of spare slots in the whole job.")]
Bound = Annotated[
    str | None,
    typer.Option(
        "--bound", metavar="AXIS,..", help=f"Axes that stay in one NVLink clique. Default: {', '.join(BOUND)}."
    ),
]
OfRun = Annotated[bool, typer.Option("--run", help="Read a running or ended run from its journal.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_AXIS = re.compile(r"([A-Za-z_]\w*)=(-1|\d{1,7})", re.ASCII)


@topology.command(
    epilog="Examples: rackctl topology show --run; rackctl topology show rack.yaml --mesh dp=-1,tp=8 --spares 8"
)
def show(
    file: File = None,
    mesh: MeshOption = "",
    spares: Spares = 0,
    bound: Bound = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="OUT", help="Write an SVG file instead of printing.")
    ] = None,
    run: OfRun = False,
    as_json: Json = False,
) -> None:
    """Draw racks. With --mesh: where each rank would sit. With --run: where each rank sits, and GPU health."""
    if run:
        job = _job(file, mesh, spares, bound)
        if as_json:
            print(json.dumps(job_as_json(job)))
        elif svg is not None:
            _write(svg, draw_job_svg(job))
        else:
            Console(markup=False, emoji=False).print(draw_job(job))
        return
    rack = _found(file)
    placed = _placed(rack, mesh, spares, bound) if mesh else None
    if as_json:
        told = {"topology": json.loads(rack.to_json()), "content_id": rack.content_id}
        print(json.dumps(told | ({} if placed is None else {"slots": placed.slots, "spares": placed.spares})))
    elif svg is not None:
        _write(svg, draw_svg(rack, placed))
    else:
        Console(markup=False, emoji=False).print(draw_text(rack, placed))


@topology.command(
    epilog="Examples: rackctl topology check --run out/; rackctl topology check rack.yaml --mesh dp=-1,tp=8 --spares 8"
)
def check(
    file: File = None,
    mesh: MeshOption = "",
    spares: Spares = 0,
    bound: Bound = None,
    run: OfRun = False,
    as_json: Json = False,
) -> None:
    """Check a rack and a mesh. Is the rack possible, and does the mesh fit? Without FILE: may every GPU here be used?

    With --run: list what is wrong with the job's rack. Exit code 1: there are problems.
    """
    if run:
        job = _job(file, mesh, spares, bound)
        if not as_json:
            print(shape_of(job))
        _tell(job.problems(), as_json)
        return
    problems: list[str] = []
    if file is None:
        reading = read_once()
        indices = [] if isinstance(reading, NvmlUnavailable) else [gpu.index for gpu in reading.gpus]
        problems += preflight(reading, indices)
    if file is not None or not problems:
        rack = _found(file)
        if mesh:
            _placed(rack, mesh, spares, bound)
        if not as_json:
            cliques = len({seat.clique for seat in rack.seats})
            print(f"{len(rack.racks)} racks, {len(rack.trays)} trays, {len(rack.seats)} GPUs, {cliques} cliques")
    _tell(problems, as_json)


@topology.command(
    epilog="Examples: rackctl topology explain 17 --run; rackctl topology explain 17 rack.yaml --mesh dp=-1,tp=8 --spares 8"
)
def explain(
    rank: Annotated[int, typer.Argument(min=0, help="The rank to explain.")],
    file: File = None,
    mesh: MeshOption = "",
    spares: Spares = 0,
    bound: Bound = None,
    run: OfRun = False,
    as_json: Json = False,
) -> None:
    """Explain the place of a rank. Why it sits there, and which spare would take over; with --run also since when."""
    if run:
        lines = _job(file, mesh, spares, bound).explain(rank)
    else:
        lines = _placed(_found(file), mesh or "dp=-1", spares, bound).explain(rank)
    print(json.dumps({"rank": rank, "lines": lines}) if as_json else "\n".join(lines))


def _job(run: Path | None, mesh: str, spares: int, bound: str | None) -> RankPlacement:
    if mesh or spares or bound is not None:
        raise UsageError("a run has its mesh and its spares.", remedy="leave --mesh, --spares and --bound away.")
    return read_placement(find_run(None if run is None else str(run)) / "journal.sqlite")


def _tell(problems: list[str], as_json: bool) -> None:
    """Raises Exit(1) if there are any."""
    print(
        json.dumps({"problems": problems}) if as_json else "\n".join(problems), end="\n" if problems or as_json else ""
    )
    if problems:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", remedy="give another --svg.") from error


def _found(file: Path | None) -> Topology:
    if file is not None:
        return read_rack_file(file)
    found = discover()
    if isinstance(found, NvmlUnavailable):
        raise TopologyError(found.what, remedy="give a rack file; see examples/racks.")
    return merge([found])


def _placed(rack: Topology, mesh: str, spares: int, bound: str | None) -> Placement:
    axes, board = _axes(mesh), PlacementArrays(rack)
    axes_bound = None if bound is None else [name for name in bound.split(",") if name]
    if open_axis := next((name for name, size in axes.items() if size == -1), None):
        of_mesh = Mesh.of({name: max(size, 1) for name, size in axes.items()}, axes_bound)
        axes[open_axis] = max(_room(rack, of_mesh, spares) // math.prod(of_mesh.shape), 1)
    return place_first(board, Mesh.of(axes, axes_bound), spares=spares)


def _axes(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in axes or (match[2] == "-1" and -1 in axes.values()):
            raise UsageError(
                f"--mesh {text!r}: {part.strip()!r} is not AXIS=SIZE, is there twice, or is a second -1.",
                remedy="for example --mesh pp=2,dp=-1,tp=4.",
            )
        axes[match[1]] = int(match[2])
    return axes


def _room(rack: Topology, mesh: Mesh, spares: int) -> int:
    """Ranks for which there is room, in whole bound groups, when so many slots are free in all."""
    cliques = Counter(seat.clique for seat in rack.seats)
    whole = sum(count // mesh.group_size for count in cliques.values())
    kept = max(len(rack.seats) - spares, 0) // mesh.group_size
    return min(whole, kept) * mesh.group_size
