"""Parsing and checks of ``--rack``, ``--mesh`` and ``--cross-clique``: the known topology, and whether the job fits
it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackrun.errors import UsageError
from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Topology, Tray
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.rank_assignment import place_first
from rackrun.topology.placement.rank_environment import nccl_environment
from rackrun.topology.sources.partial_topology import partial_of_tray

__all__ = ["Axes", "HostRack", "check_mesh", "mesh_text", "parse_mesh", "rack_here"]

Axes = tuple[tuple[str, int], ...]
_AXIS = re.compile(r"([A-Za-z_]\w*)=([1-9]\d{0,6})", re.ASCII)
_NPROC = "1"
"""torchrun's default for --nproc-per-node."""


class HostRack(msgspec.Struct, frozen=True, kw_only=True):
    """A rack file, and which of its trays belong to this host."""

    file: str
    topology: Topology
    trays: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        """Whether this host runs the agents of several trays."""
        return len(self.trays) > 1

    def slots(self, tray: str) -> int:
        return len(self.topology.trays[tray][1].gpus)

    def partial(self, tray: str) -> bytes:
        """Return the value of `AgentConfig.topology`."""
        return msgspec.json.encode([partial_of_tray(self.topology, tray, self.file)])

    def slot_env(self, tray: str) -> tuple[dict[str, str], ...]:
        """Return the value of `AgentConfig.slot_env`. It depends on the whole rack, and every host reads the same
        file."""
        slots = (SlotId(f"{tray}/{index}") for index in range(self.slots(tray)))
        return tuple({one.name: one.value for one in nccl_environment(self.topology, slot)} for slot in slots)


def rack_here(file: Path, *, nodes: tuple[int, int], nproc: str, trays: int, host: str, trays_max: int) -> HostRack:
    """Read a rack file and find this host's trays in it. Raises UsageError, including `RackFileError`.

    ``nodes``: from --nnodes. A single host runs an agent for every tray of the file; with several hosts, each runs its
    own tray. ``nproc`` and ``trays``: as given, "1" and 1 if not. ``host``: this host's name.
    """
    topology = read_rack_file(file)
    found = [tray for rack in topology.racks for tray in rack.trays]
    for tray in found:
        _check_tray(file, tray, nproc)
    if trays not in (1, len(found)):
        raise UsageError(
            f"--trays {trays} contradicts {file}, which has {len(found)}.",
            remedy="leave --trays out: the file decides.",
        )
    if nodes[1] == 1:
        if len(found) > trays_max:
            raise UsageError(
                f"{file} has {len(found)} trays, and a host can stand for {trays_max} at the most.",
                remedy="give a smaller rack file, or --nnodes.",
            )
        return HostRack(file=str(file), topology=topology, trays=tuple(tray.name for tray in found))
    if nodes[1] != len(found):
        raise UsageError(
            f"--nnodes {nodes[1]} contradicts {file}, which has {len(found)} trays, each of them a host.",
            remedy=f"give --nnodes {len(found)}, or a file with the hosts of this job.",
        )
    return HostRack(file=str(file), topology=topology, trays=(_own(file, found, host),))


def parse_mesh(text: str) -> Axes:
    """Parse ``dp=16,tp=4``. Raises UsageError."""
    axes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in axes:
            raise UsageError(
                f"--mesh {text!r}: {part.strip()!r} is not AXIS=SIZE, or is there twice.",
                remedy="name the axes in order, the fastest last: --mesh dp=16,tp=4.",
            )
        axes[match[1]] = int(match[2])
    return tuple(axes.items())


def mesh_text(axes: Axes) -> str:
    """Return the axes as text for RACKRUN_MESH."""
    return ",".join(f"{name}={size}" for name, size in axes)


def check_mesh(axes: Axes, slots: int, spares: int, topology: Topology | None, *, cross_clique: bool) -> None:
    """Check that the mesh fits into ``slots``, of which ``spares`` are held back, and into the NVLink domains. Raises
    UsageError."""
    if not axes:
        return
    text, ranks = mesh_text(axes), math.prod(size for _, size in axes)
    if ranks > slots - spares:
        raise UsageError(
            f"--mesh {text} is {ranks} ranks, and there are {slots} slots, {spares} of them spares.",
            remedy=f"make it {slots - spares} at the most, or lower --spares.",
        )
    if topology is None:
        return
    try:
        place_first(PlacementArrays(topology), Mesh.of(dict(axes)), spares=spares, allow_cross_clique=cross_clique)
    except DoesNotFit as error:
        raise UsageError(f"--mesh {text} with --spares {spares}: {error.what}", remedy=error.remedy) from error


def _check_tray(file: Path, tray: Tray, nproc: str) -> None:
    indices = [gpu.index for gpu in tray.gpus]
    if indices != list(range(len(indices))):
        raise UsageError(
            f"{file}: the GPUs of {tray.name} are numbered {', '.join(map(str, indices))}.",
            remedy="number them from 0 without gaps, as workers see them.",
        )
    if nproc not in (_NPROC, str(len(indices))):
        raise UsageError(
            f"--nproc-per-node {nproc} contradicts {file}: {tray.name} has {len(indices)} GPUs.",
            remedy="leave --nproc-per-node out: the file decides.",
        )


def _own(file: Path, trays: Sequence[Tray], host: str) -> str:
    """Return this host's tray, found by the tray's host, else by its name; domains are ignored."""
    short = _short(host)
    own = [tray.name for tray in trays if short in (_short(tray.host), _short(tray.name))]
    if len(own) == 1:
        return own[0]
    if own:
        what = f"{file} calls {' and '.join(own)} so"
    else:
        named = [f"{tray.name} ({tray.host})" if tray.host else tray.name for tray in trays]
        more = f" and {len(named) - 6} more" if len(named) > 6 else ""
        what = f"{file} has no tray of that name, only {', '.join(named[:6])}{more}"
    raise UsageError(
        f"this host is {short}, and {what}.",
        remedy=f"in {file}, add `host: {short}` to this host's tray, and to no other.",
    )


def _short(name: str) -> str:
    return name.partition(".")[0]
