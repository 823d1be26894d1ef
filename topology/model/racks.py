"""Racks, trays and GPUs by location, and the NVLink domains and cliques that join them: two trees, linked by GPU UUIDs.

The trees are separate because they change separately: a rack may be divided into several cliques, a domain's UUID may
change when the fabric manager restarts, and a repaired tray returns to its slot with other GPUs.

A `Topology` is a value: equal ones have equal JSON and an equal `Topology.content_id`, in whatever order they were
found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from rackrun.topology.model.errors import TopologyError

__all__ = ["Clique", "CliqueId", "Gpu", "Rack", "GpuLocation", "Topology", "Tray"]


class CliqueId(msgspec.Struct, frozen=True, order=True):
    """Names a clique. GPUs of equal domain and clique can access each other's memory over NVLink.

    NCCL uses the same rule for multi-node NVLink.
    """

    domain: str
    """The cluster UUID; ``host:NAME`` for the NVSwitches of a single host, which have no UUID."""
    clique: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.clique}"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU of a tray."""

    uuid: str
    index: int
    """The driver's index on its tray, from 0. Its worker's slot is ``tray/index``."""
    module_id: int | None = None
    bdf: str = ""
    """PCI address, such as ``00000008:01:00.0``."""
    serial: str = ""
    numa: int | None = None
    """The NUMA node of the CPU to which the GPU is attached, not of the GPU's own memory."""
    cpus: str = ""
    """The CPU cores near the GPU, such as ``0-71``."""
    nics: tuple[str, ...] = ()
    """The network cards near the GPU, nearest first."""


class Tray(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A compute tray: one host, which is repaired and replaced as a whole."""

    name: str
    """The runtime's name for the tray: `rackrun.protocol.ids.TrayId`."""
    index: int
    """Position among the compute trays of its rack, from 0."""
    gpus: tuple[Gpu, ...]
    host: str = ""
    slot: int | None = None
    """Position in the rack, counting switch trays too."""
    serial: str = ""


class Rack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rack and its trays."""

    serial: str
    """Serial of the chassis, which stays when everything in it is replaced."""
    trays: tuple[Tray, ...]
    fabric: tuple[str, ...] = ()
    """The switches above the rack, nearest first, up to the one that all racks share."""


class Clique(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of one clique."""

    id: CliqueId
    gpus: tuple[str, ...]
    """GPU UUIDs."""


class GpuLocation(NamedTuple):
    """A GPU, its place, and its clique."""

    rack: Rack
    tray: Tray
    gpu: Gpu
    clique: CliqueId

    @property
    def slot(self) -> str:
        return f"{self.tray.name}/{self.gpu.index}"


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All racks of a job, and the cliques of their GPUs."""

    racks: tuple[Rack, ...]
    cliques: tuple[Clique, ...] = ()
    """A GPU that is in no clique is joined only with the GPUs of its own tray: see `seats`."""

    @classmethod
    def of(cls, racks: Iterable[Rack], cliques: Iterable[Clique] = ()) -> Topology:
        """Return the topology in canonical order. Raises `TopologyError` when it contradicts itself."""
        topology = cls(
            racks=tuple(sorted((_sorted(rack) for rack in racks), key=lambda rack: rack.serial)),
            cliques=tuple(
                sorted(
                    (Clique(id=clique.id, gpus=tuple(sorted(clique.gpus))) for clique in cliques),
                    key=lambda clique: clique.id,
                )
            ),
        )
        _check(topology)
        return topology

    def to_json(self) -> bytes:
        """Return canonical JSON: equal topologies give equal bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Topology:
        """Decode a topology. Raises `TopologyError`."""
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise TopologyError(f"this is no topology: {error}.", remedy="write it with this release.") from error
        return cls.of(found.racks, found.cliques)

    @cached_property
    def content_id(self) -> str:
        """sha256 of the JSON, as hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @cached_property
    def seats(self) -> tuple[GpuLocation, ...]:
        """Every GPU, rack by rack and tray by tray."""
        clique_of = {gpu: clique.id for clique in self.cliques for gpu in clique.gpus}
        return tuple(
            GpuLocation(rack, tray, gpu, clique_of.get(gpu.uuid) or CliqueId(f"host:{tray.name}", 0))
            for rack in self.racks
            for tray in rack.trays
            for gpu in tray.gpus
        )

    @cached_property
    def by_slot(self) -> dict[str, GpuLocation]:
        return {seat.slot: seat for seat in self.seats}

    @cached_property
    def trays(self) -> dict[str, tuple[Rack, Tray]]:
        return {tray.name: (rack, tray) for rack in self.racks for tray in rack.trays}


def _sorted(rack: Rack) -> Rack:
    trays = (
        msgspec.structs.replace(tray, gpus=tuple(sorted(tray.gpus, key=lambda gpu: gpu.index))) for tray in rack.trays
    )
    return msgspec.structs.replace(rack, trays=tuple(sorted(trays, key=lambda tray: tray.index)))


def _check(topology: Topology) -> None:
    """Raise `TopologyError` for names, serials or UUIDs that occur twice, and for cliques with unknown GPUs."""
    trays = [(rack, tray) for rack in topology.racks for tray in rack.trays]
    gpus = {gpu.uuid for _, tray in trays for gpu in tray.gpus}
    _unique("chassis serial", ((rack.serial, f"rack {rack.serial}") for rack in topology.racks))
    _unique("tray name", ((tray.name, f"tray {tray.name} of rack {rack.serial}") for rack, tray in trays))
    _unique("tray serial", ((tray.serial, f"tray {tray.name}") for _, tray in trays if tray.serial))
    _unique("tray index", (((rack.serial, tray.index), f"tray {tray.name}") for rack, tray in trays))
    _unique("GPU UUID", ((gpu.uuid, f"{tray.name}/{gpu.index}") for _, tray in trays for gpu in tray.gpus))
    _unique("GPU index", (((tray.name, gpu.index), f"a GPU of {tray.name}") for _, tray in trays for gpu in tray.gpus))
    _unique("clique", ((clique.id, f"clique {clique.id}") for clique in topology.cliques))
    _unique("member of cliques", ((gpu, f"clique {clique.id}") for clique in topology.cliques for gpu in clique.gpus))
    for clique in topology.cliques:
        for gpu in clique.gpus:
            if gpu not in gpus:
                raise TopologyError(
                    f"clique {clique.id} has {gpu}, which is on no tray.",
                    remedy="name the GPUs of the trays that are described.",
                )


def _unique(what: str, found: Iterator[tuple[object, str]]) -> None:
    seen: dict[object, str] = {}
    for key, whose in found:
        if key in seen:
            raise TopologyError(
                f"the {what} {key} is there twice: {seen[key]}, and {whose}.", remedy="give each its own."
            )
        seen[key] = whose
