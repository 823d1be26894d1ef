"""Parse nvidia-smi's output, for hosts where NVML cannot be called: its CSV, and the matrix of ``nvidia-smi topo -m``.

The matrix says nothing about NICs on a GB200: there every GPU is attached to its CPU by NVLink-C2C, and all NICs are
SYS.
"""

from __future__ import annotations

import csv
import re

import msgspec

from rackrun.topology.gpu_driver.readings import normal_bdf
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.sources.kubernetes import parse_clique
from rackrun.topology.sources.partial_topology import FoundGpu, FoundTray, PartialTopology

__all__ = ["QUERY", "TopoMatrix", "from_smi_csv", "parse_topo_matrix", "with_matrix"]

QUERY = "index,uuid,pci.bus_id,serial,fabric.clusterUuid,fabric.cliqueId"
"""The fields for ``nvidia-smi --query-gpu=... --format=csv,noheader``."""

_CONNECTION = re.compile(r"X|PIX|PXB|PHB|NODE|SYS|NV\d+")
_ROW = re.compile(r"\s*GPU(\d+)\s+(\S.*)", re.ASCII)
_NEAR = ("PIX", "PXB", "PHB")
_NUMBERS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.ASCII)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NOTHING = frozenset({"", "n/a", "[n/a]", "[not supported]", "not supported", "[unknown error]"})


def from_smi_csv(text: str, host: str) -> PartialTopology:
    """Parse the answer to `QUERY`, with or without a header. Raises `TopologyError`."""
    gpus = []
    for row in csv.reader(line for line in text.splitlines() if line.strip()):
        cells = [cell.strip() for cell in row]
        if cells[:1] == ["index"]:
            continue
        if len(cells) != len(QUERY.split(",")) or not cells[0].isdecimal():
            raise TopologyError(f"nvidia-smi on {host} says {','.join(row)[:80]!r}.", remedy=f"query it for {QUERY}.")
        index, uuid, bdf, serial, domain, clique = ("" if cell.lower() in _NOTHING else cell for cell in cells)
        gpus.append(
            FoundGpu(
                index=int(index),
                uuid=uuid,
                bdf=normal_bdf(bdf),
                serial="" if serial == "0" else serial,
                clique=parse_clique(f"{domain}.{clique}") if domain and clique else None,
            )
        )
    tray = FoundTray(host=host, gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)))
    return PartialTopology(kind="nvidia-smi", where=f"nvidia-smi on {host}", trays=(tray,))


class TopoMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """The matrix of one host, by GPU index."""

    nvlinks: dict[int, int]
    """GPU -> the number of NVLinks to the GPU that it has the most to."""
    nics: dict[int, tuple[str, ...]]
    """GPU -> NICs behind the same PCIe switch or host bridge, nearest first."""
    cpus: dict[int, str]
    numa: dict[int, int]


def parse_topo_matrix(text: str) -> TopoMatrix:
    """Parse the output of ``nvidia-smi topo -m``. Raises `TopologyError` when there is no matrix in it.

    Rows are recognised by their cells rather than by columns: a header may contain escapes or be wrapped, two names may
    run into each other, other lines may come before the matrix, and empty cells shift what follows.
    """
    lines = [_ESCAPE.sub("", line).rstrip() for line in text.splitlines()]
    gpu_rows: dict[int, tuple[list[str], list[str]]] = {}
    for line in lines:
        match = _ROW.match(line)
        cells = _cells(match[2]) if match else None
        if match and cells:
            gpu_rows[int(match[1])] = cells
    if not gpu_rows:
        raise TopologyError("there is no matrix in this text.", remedy="give the output of `nvidia-smi topo -m`.")
    names = _column_names(lines, max(len(connections) for connections, _ in gpu_rows.values()))
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)\s*$", "\n".join(lines), re.MULTILINE))
    matrix = TopoMatrix(nvlinks={}, nics={}, cpus={}, numa={})
    for index, (connections, rest) in sorted(gpu_rows.items()):
        named = list(zip(names, connections, strict=False))
        to_gpus = [int(cell[2:]) for name, cell in named if name.startswith("GPU") and cell.startswith("NV")]
        matrix.nvlinks[index] = max(to_gpus, default=0)
        near = sorted(
            (_NEAR.index(cell), at, legend.get(name, name))
            for at, (name, cell) in enumerate(named)
            if not name.startswith("GPU") and cell in _NEAR
        )
        matrix.nics[index] = tuple(name for _, _, name in near)
        _affinities(rest, index, matrix)
    return matrix


def with_matrix(partial: PartialTopology, matrix: TopoMatrix) -> PartialTopology:
    """Add the matrix's data to the one tray of ``partial``, where it is missing."""
    (tray,) = partial.trays
    gpus = tuple(
        msgspec.structs.replace(
            gpu,
            nics=gpu.nics or matrix.nics.get(gpu.index, ()),
            cpus=gpu.cpus or matrix.cpus.get(gpu.index, ""),
            numa=gpu.numa if gpu.numa is not None else matrix.numa.get(gpu.index),
        )
        for gpu in tray.gpus
    )
    return msgspec.structs.replace(partial, trays=(msgspec.structs.replace(tray, gpus=gpus),))


def _cells(rest: str) -> tuple[list[str], list[str]] | None:
    """Return the connections and the affinities of a row; None for another line.

    Cells are split at tabs where there are any, so that an empty cell is seen.
    """
    words = [word.strip() for word in (rest.split("\t") if "\t" in rest else rest.split())]
    connections: list[str] = []
    while words and (_CONNECTION.fullmatch(words[0]) or (not words[0] and not connections)):
        word = words.pop(0)
        if word:
            connections.append(word)
    return (connections, words) if "X" in connections else None


def _affinities(rest: list[str], index: int, matrix: TopoMatrix) -> None:
    """Store the affinities of a row: CPU affinity, NUMA affinity, the GPU's own node.

    Any of them may be empty or N/A.
    """
    cpus = rest[0] if rest else ""
    numa = rest[1] if len(rest) > 1 else ""
    if _NUMBERS.fullmatch(cpus):
        matrix.cpus[index] = cpus
    if _NUMBERS.fullmatch(numa):
        matrix.numa[index] = int(re.split(r"[-,]", numa)[0])  # `0,2-17`: the CPU's node, then nodes of GPU memory


def _column_names(lines: list[str], count: int) -> list[str]:
    """Return the names in the header, however many lines it takes: as many as a row has connections."""
    before: list[str] = []
    for line in lines:
        row = _ROW.match(line)
        if row and _cells(row[2]):
            break
        before.append(line)
    first = next((at for at, line in enumerate(before) if re.match(r"\s*GPU0\b|\s*GPU0(?=GPU|NIC|mlx)", line)), None)
    header = " ".join(before[first:]) if first is not None else ""
    names = re.findall(
        r"GPU\d+|NIC\d+|mlx\d+_(?:bond_)?\d+?(?=mlx|NIC|GPU|\s|$)|\b(?!CPU|NUMA|Affinity|GPU|ID)\w+_\w+", header
    )
    if len(names) < count:  # cut off or unreadable: the GPUs come first, and the rest gets numbered names
        gpus = sum(1 for line in lines if (row := _ROW.match(line)) and _cells(row[2]))
        names = [f"GPU{at}" for at in range(gpus)] + [f"NIC{at}" for at in range(count - gpus)]
    return names[:count]
