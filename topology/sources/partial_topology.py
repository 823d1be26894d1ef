"""What one source knows of the topology, and the merge of several sources into one topology.

Sources are merged by host. Where one source lacks a value the next is used, in the order of `PRECEDENCE`. Where two
contradict each other about a clique, a rack or a GPU's UUID, neither is used: `SourcesDisagree` names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from rackrun.topology.gpu_driver.readings import TrayReading
from rackrun.topology.model.errors import SourcesDisagree, TopologyError
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray

__all__ = [
    "PRECEDENCE",
    "FoundGpu",
    "FoundTray",
    "Kind",
    "PartialTopology",
    "merge",
    "partial_of_reading",
    "partial_of_tray",
]

T = TypeVar("T")
Kind = Literal["nvml", "nvidia-smi", "nmx", "kubernetes", "topograph", "slurm", "rack file"]
PRECEDENCE: tuple[Kind, ...] = ("nvml", "nvidia-smi", "nmx", "kubernetes", "topograph", "slurm", "rack file")


class FoundGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU as one source reports it. Empty fields are not known."""

    index: int
    uuid: str = ""
    module_id: int | None = None
    bdf: str = ""
    serial: str = ""
    numa: int | None = None
    cpus: str = ""
    nics: tuple[str, ...] = ()
    clique: CliqueId | None = None


class FoundTray(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tray as one source reports it. Empty fields are not known."""

    host: str
    """The host name without its domain, by which sources are merged."""
    rack: str = ""
    """Serial of the chassis."""
    index: int | None = None
    """Position among the compute trays of its rack."""
    slot: int | None = None
    serial: str = ""
    gpus: tuple[FoundGpu, ...] = ()
    clique: CliqueId | None = None
    """The clique of all its GPUs, where the source knows hosts only."""
    block: str = ""
    """A name for hosts that belong together, such as Slurm's block.

    It counts as an NVLink domain if no source knows cliques.
    """
    fabric: tuple[str, ...] = ()
    """The switches above it, nearest first."""


class PartialTopology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one source knows."""

    kind: Kind
    where: str
    """Where it was read, such as ``NVML on tray-03`` or ``/etc/slurm/topology.yaml``."""
    trays: tuple[FoundTray, ...]
    notes: tuple[str, ...] = ()
    """What could not be read, and what follows from that."""


def partial_of_reading(reading: TrayReading, host: str) -> PartialTopology:
    """Return this tray as NVML reports it.

    A GPU without a UUID (lost before it was ever read) is left out with a note.
    """
    platforms = [gpu.platform for gpu in reading.gpus if gpu.platform is not None]
    place = platforms[0] if platforms else None
    notes = [f"GPU {gpu.index} is {gpu.verdict or 'nameless'} and left out" for gpu in reading.gpus if not gpu.uuid]
    notes += [f"GPU {gpu.index}: no permission to read {field}" for gpu in reading.gpus for field in gpu.refused]
    if len({(one.chassis, one.tray) for one in platforms}) > 1:
        notes.append("its GPUs name different trays as theirs; the first is believed")
    gpus = tuple(
        FoundGpu(
            index=gpu.index,
            uuid=gpu.uuid,
            module_id=gpu.module_id,
            bdf=gpu.bdf,
            serial=gpu.serial,
            numa=gpu.numa,
            cpus=gpu.cpus,
            clique=gpu.fabric.joined if gpu.fabric else None,
        )
        for gpu in reading.gpus
        if gpu.uuid
    )
    tray = FoundTray(
        host=host,
        rack=place.chassis if place else "",
        index=place.tray if place else None,
        slot=place.slot if place else None,
        gpus=gpus,
    )
    return PartialTopology(kind="nvml", where=f"NVML on {host}", trays=(tray,), notes=tuple(notes))


def partial_of_tray(topology: Topology, name: str, where: str) -> PartialTopology:
    """Return the tray ``name`` as a rack file describes it. ``where``: the file. Its host is the tray's name.

    Raises KeyError for an unknown tray.
    """
    rack, tray = topology.trays[name]
    clique_of = {gpu: clique.id for clique in topology.cliques for gpu in clique.gpus}
    gpus = tuple(
        FoundGpu(
            index=gpu.index,
            uuid=gpu.uuid,
            module_id=gpu.module_id,
            bdf=gpu.bdf,
            serial=gpu.serial,
            numa=gpu.numa,
            cpus=gpu.cpus,
            nics=gpu.nics,
            clique=clique_of.get(gpu.uuid),
        )
        for gpu in tray.gpus
    )
    found = FoundTray(
        host=name,
        rack=rack.serial,
        index=tray.index,
        slot=tray.slot,
        serial=tray.serial,
        gpus=gpus,
        fabric=rack.fabric,
    )
    return PartialTopology(kind="rack file", where=where, trays=(found,))


def merge(partials: Iterable[PartialTopology]) -> Topology:
    """Merge sources into one topology, in any order. Trays are named after their hosts.

    Raises `SourcesDisagree`, and `TopologyError` for an impossible topology or one without GPUs.
    """
    ordered = sorted(partials, key=lambda one: (PRECEDENCE.index(one.kind), one.where, msgspec.json.encode(one)))
    said: dict[str, list[_Said]] = {}
    for partial in ordered:
        for tray in partial.trays:
            said.setdefault(tray.host, []).append(_Said(partial.kind, partial.where, tray))
    hosts = [_Host(host, sources) for host, sources in sorted(said.items())]
    hosts = [host for host in hosts if host.gpus]  # a host that only a scheduler knows runs nothing here
    if not hosts:
        raise TopologyError("no source knows any GPU.", remedy="run where NVML answers, or give a rack file.")
    _name_racks(hosts)
    racks: dict[str, list[_Host]] = {}
    for host in hosts:
        racks.setdefault(host.rack, []).append(host)
    members: dict[CliqueId, list[str]] = {}
    for host in hosts:
        for gpu in host.gpus:
            clique = host.clique_of(gpu)
            if clique is not None:
                members.setdefault(clique, []).append(gpu.uuid)
    return Topology.of(
        [_rack(serial, inside) for serial, inside in racks.items()],
        [Clique(id=clique, gpus=tuple(gpus)) for clique, gpus in members.items()],
    )


class _Said(msgspec.Struct, frozen=True):
    kind: Kind
    where: str
    tray: FoundTray


class _Host:
    """One host, with the values that all sources give together."""

    def __init__(self, name: str, sources: Sequence[_Said]) -> None:
        self.name, self._sources = name, sources
        self.rack = self._agreed(f"host {name} is in rack", lambda tray: tray.rack) or ""
        self.index = self._agreed(f"host {name} is compute tray", lambda tray: tray.index)
        self.slot = self._first(lambda tray: tray.slot)
        self.serial = self._first(lambda tray: tray.serial) or ""
        self.block = self._first(lambda tray: tray.block) or ""
        self.fabric = self._first(lambda tray: tray.fabric) or ()
        indices = sorted({gpu.index for said in sources for gpu in said.tray.gpus})
        found = (self._gpu(index) for index in indices)
        self.gpus = tuple(gpu for gpu in found if gpu.uuid)

    def clique_of(self, gpu: Gpu) -> CliqueId | None:
        """Return a GPU's clique; None when no source names one. Raises `SourcesDisagree`."""
        known = self._agreed(
            f"GPU {gpu.index} of {self.name} is in clique",
            lambda tray: next((one.clique for one in tray.gpus if one.index == gpu.index), None) or tray.clique,
        )
        # The driver knows all cliques that span hosts: where it names none, a block is only a location.
        guess = self.block and not any(said.kind == "nvml" for said in self._sources)
        return known or (CliqueId(f"block:{self.block}", 0) if guess else None)

    def _gpu(self, index: int) -> Gpu:
        def of(tray: FoundTray) -> FoundGpu:
            return next((gpu for gpu in tray.gpus if gpu.index == index), FoundGpu(index=index))

        return Gpu(
            index=index,
            uuid=self._agreed(f"GPU {index} of {self.name} is", lambda tray: of(tray).uuid) or "",
            module_id=self._first(lambda tray: of(tray).module_id),
            bdf=self._first(lambda tray: of(tray).bdf) or "",
            serial=self._first(lambda tray: of(tray).serial) or "",
            numa=self._first(lambda tray: of(tray).numa),
            cpus=self._first(lambda tray: of(tray).cpus) or "",
            nics=self._first(lambda tray: of(tray).nics) or (),
        )

    def _first(self, take: Callable[[FoundTray], T | None]) -> T | None:
        values = (take(said.tray) for said in self._sources)
        return next((value for value in values if value not in (None, "", ())), None)

    def _agreed(self, what: str, take: Callable[[FoundTray], T | None]) -> T | None:
        """Return the value that the sources give. Raises `SourcesDisagree` when two give different ones."""
        found: tuple[T, str] | None = None
        for said in self._sources:
            value = take(said.tray)
            if value is None or value == "":
                continue
            if found is None:
                found = value, said.where
            elif value != found[0]:
                raise SourcesDisagree(
                    f"{what} {found[0]} by {found[1]}, and {value} by {said.where}.",
                    remedy="one of them is old: bring it up to date, or do not give it.",
                )
        return found[0] if found else None


def _name_racks(hosts: Sequence[_Host]) -> None:
    """Give hosts with an unknown chassis a rack.

    It is that of their clique if the clique is in one rack, else a rack of their own.
    """
    racks_of: dict[CliqueId, set[str]] = {}
    cliques = {host.name: {clique for gpu in host.gpus if (clique := host.clique_of(gpu))} for host in hosts}
    for host in hosts:
        for clique in cliques[host.name]:
            racks_of.setdefault(clique, set()).update({host.rack} - {""})
    for host in hosts:
        if host.rack:
            continue
        known = set().union(*(racks_of[clique] for clique in cliques[host.name]))
        first = min(cliques[host.name], default=None)
        host.rack = known.pop() if len(known) == 1 else (first.domain if first else f"host:{host.name}")


def _rack(serial: str, hosts: Sequence[_Host]) -> Rack:
    """Build a rack. Trays with an unknown index take the free ones, in the order of their names."""
    taken = {host.index for host in hosts if host.index is not None}
    free = (index for index in range(len(hosts) + len(taken)) if index not in taken)
    trays = tuple(
        Tray(
            name=host.name,
            host=host.name,
            index=host.index if host.index is not None else next(free),
            slot=host.slot,
            serial=host.serial,
            gpus=host.gpus,
        )
        for host in hosts
    )
    fabric = next((host.fabric for host in hosts if host.fabric), ())
    return Rack(serial=serial, trays=trays, fabric=fabric)
