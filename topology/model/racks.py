"""Racks, trays and GPUs as they stand in the room, and the NVLink domains and cliques that join them: two trees, tied by GPU UUIDs.

They are kept apart because they change apart: a rack may be cut into several cliques, a domain's UUID may change when the
fabric manager starts again, and a tray that was repaired comes back in its slot with other GPUs.

A `Topology` is a value: equal ones have equal JSON and equal `Topology.content_id`, in whatever order they were found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from rackrun.topology.model.errors import TopologyError

__all__ = ["Clique", "CliqueId", "Gpu", "Rack", "Seat", "Topology", "Tray"]


class CliqueId(msgspec.Struct, frozen=True, order=True):
    """GPUs of equal domain and clique reach each other's memory over NVLink (NCCL's rule for multi-node NVLink)."""

    domain: str
    """The cluster UUID; ``host:NAME`` for the NVSwitches of one host, which have none."""
    clique: int

    def __str__(self) -> str:
        return f"{self.domain}.{self.clique}"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    uuid: str
    index: int
    """As the driver of its tray counts, from 0; its worker's slot is ``tray/index``."""
    module_id: int | None = None
    bdf: str = ""
    """PCI address, ``00000008:01:00.0``."""
    serial: str = ""
    numa: int | None = None
    """The NUMA node of the CPU that it hangs on, not that of its own memory."""
    cpus: str = ""
    """The cores near it, ``0-71``."""
    nics: tuple[str, ...] = ()
    """The network cards near it, the nearest first."""


class Tray(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A compute tray: one host, what is repaired and replaced as a whole."""

    name: str
    """As the runtime calls it: `rackrun.protocol.ids.TrayId`."""
    index: int
    """Among the compute trays of its rack, from 0."""
    gpus: tuple[Gpu, ...]
    host: str = ""
    slot: int | None = None
    """In the rack, counting switch trays too."""
    serial: str = ""


class Rack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    serial: str
    """Of the chassis: what stays when all else is replaced."""
    trays: tuple[Tray, ...]
    fabric: tuple[str, ...] = ()
    """The switches above it, the nearest first, to the one that all racks share."""


class Clique(msgspec.Struct, frozen=True, kw_only=True):
    id: CliqueId
    gpus: tuple[str, ...]
    """UUIDs."""


class Seat(NamedTuple):
    """A GPU, and where it is."""

    rack: Rack
    tray: Tray
    gpu: Gpu
    clique: CliqueId

    @property
    def slot(self) -> str:
        return f"{self.tray.name}/{self.gpu.index}"


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    racks: tuple[Rack, ...]
    cliques: tuple[Clique, ...] = ()
    """A GPU that is in none is joined with its own tray's alone: see `seats`."""

    @classmethod
    def of(cls, racks: Iterable[Rack], cliques: Iterable[Clique] = ()) -> Topology:
        """In canonical order, checked. Raises `TopologyError`."""
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
        """Canonical: equal topologies are equal bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Topology:
        """Raises `TopologyError`."""
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise TopologyError(f"this is no topology: {error}.", remedy="write it with this release.") from error
        return cls.of(found.racks, found.cliques)

    @cached_property
    def content_id(self) -> str:
        """sha256 of the JSON, hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Every GPU, rack by rack and tray by tray."""
        clique_of = {gpu: clique.id for clique in self.cliques for gpu in clique.gpus}
        return tuple(
            Seat(rack, tray, gpu, clique_of.get(gpu.uuid) or CliqueId(f"host:{tray.name}", 0))
            for rack in self.racks
            for tray in rack.trays
            for gpu in tray.gpus
        )

    @cached_property
    def by_slot(self) -> dict[str, Seat]:
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
