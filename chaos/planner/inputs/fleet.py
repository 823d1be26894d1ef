"""The hardware of a fleet, and the job that runs on it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray
from rackrun.topology.placement.arrays import PlacementArrays

__all__ = ["Fleet", "FleetJob", "board_of", "fleet_of"]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Racks, each of them one NVLink domain. Slots are numbered through racks, trays and GPUs."""

    racks: int
    trays: int = 18
    """Trays per rack."""
    gpus: int = 4
    """GPUs per tray."""

    def __post_init__(self) -> None:
        if min(self.racks, self.trays, self.gpus) < 1:
            raise PlannerError(
                f"{self.racks} racks of {self.trays} trays of {self.gpus} GPUs are no fleet.",
                remedy="give 1 or more of each.",
            )

    @property
    def rack_gpus(self) -> int:
        return self.trays * self.gpus

    @property
    def total_trays(self) -> int:
        return self.racks * self.trays

    @property
    def total_gpus(self) -> int:
        return self.racks * self.rack_gpus


def fleet_of(gpus: int, trays: int = 18, gpus_per_tray: int = 4) -> Fleet:
    """Return a fleet of whole racks with at most ``gpus`` GPUs. Raises PlannerError if that is less than one rack."""
    if trays < 1 or gpus_per_tray < 1:
        raise PlannerError(
            f"a rack of {trays} trays of {gpus_per_tray} GPUs has no GPU.", remedy="give 1 or more of each."
        )
    rack = trays * gpus_per_tray
    if gpus < rack:
        raise PlannerError(
            f"--gpus {gpus} is less than a rack of {trays} trays x {gpus_per_tray} GPUs = {rack}.",
            remedy="give the GPUs of one rack or more, or say with --trays-per-rack and --gpus-per-tray what a rack is.",
        )
    return Fleet(racks=gpus // rack, trays=trays, gpus=gpus_per_tray)


class FleetJob(msgspec.Struct, frozen=True, kw_only=True):
    """How a job uses a fleet. ``group`` x pipeline stages = ``replica``; data parallelism is over replicas."""

    spares_per_rack: int = 0
    """The fewest GPUs of each rack on which no rank begins."""
    spare_racks: int = 0
    """The number of racks by whose ranks the job is smaller than would fit."""
    group: int = 4
    """Ranks that have to share a rack (tp, ep)."""
    replica: int = 64
    """Ranks of one whole model, which are lost together when the world shrinks."""
    micro_batches: int = 16
    """Micro-batches of one replica in a step, while all replicas are there.

    After a shrink some replicas have one more, and all wait for those. 0: the work can be divided without a remainder.
    """
    state: Literal["replicas", "mirror", "disk"] = "replicas"
    """Where a lost rank's state is: live on its replicas; in snapshots, with a copy on the next tray; or only
    on disk."""
    exact: bool = False
    """Whether ``reduction="exact"`` is used: a shrink keeps the bits, so it competes by its price."""
    min_ranks: int = 1
    """The fewest ranks; 0: the world never shrinks."""
    wait_for_hardware_s: float = 0.0
    max_restarts: int = 1_000_000

    def __post_init__(self) -> None:
        wrong = [
            f"{name} {getattr(self, name)}"
            for name in ("spares_per_rack", "spare_racks", "micro_batches", "min_ranks", "max_restarts")
            if getattr(self, name) < 0
        ]
        wrong += [f"{name} {getattr(self, name)}" for name in ("group", "replica") if getattr(self, name) < 1]
        if wrong or not 0 <= self.wait_for_hardware_s < math.inf:
            raise PlannerError(
                f"this cannot be a job: {', '.join(wrong) or f'wait for hardware {self.wait_for_hardware_s}'}.",
                remedy="give groups and replicas of 1 or more ranks, and nothing below 0.",
            )
        if self.replica % self.group:
            raise PlannerError(
                f"a replica of {self.replica} ranks is not made of groups of {self.group}.",
                remedy="let --group divide --replica.",
            )

    def replicas(self, fleet: Fleet) -> int:
        """Return how many replicas fit, with the spares held back. Raises PlannerError if none does."""
        if self.spares_per_rack > fleet.rack_gpus:
            raise PlannerError(
                f"a rack of {fleet.rack_gpus} GPUs cannot hold back {self.spares_per_rack} spares.",
                remedy="hold back fewer GPUs than a rack has.",
            )
        if self.spare_racks >= fleet.racks:
            raise PlannerError(
                f"{self.spare_racks} spare racks leave none of {fleet.racks} racks to the job.",
                remedy="leave at least one rack to the job.",
            )
        groups = (fleet.rack_gpus - self.spares_per_rack) // self.group
        found = groups * (fleet.racks - self.spare_racks) // (self.replica // self.group)
        if not found:
            raise PlannerError(
                f"no replica of {self.replica} ranks in groups of {self.group} fits on {fleet.racks} racks of {fleet.rack_gpus} GPUs, "
                f"with {self.spares_per_rack} spares each and {self.spare_racks} spare racks.",
                remedy="give fewer spares, smaller groups or replicas, or more racks.",
            )
        return found

    def ranks(self, fleet: Fleet) -> int:
        return self.replicas(fleet) * self.replica

    def mesh(self, replicas: int) -> Mesh:
        return Mesh.of({"dp": replicas, "pp": self.replica // self.group, "tp": self.group})


@lru_cache(maxsize=4)
def board_of(fleet: Fleet) -> PlacementArrays:
    """Return the fleet as the placement needs it. Takes 0.7 s for 100,000 GPUs."""
    built, cliques = [], []
    for rack in range(fleet.racks):
        trays = tuple(
            Tray(
                name=f"r{rack:05}-t{tray:02}",
                index=tray,
                gpus=tuple(Gpu(uuid=f"{rack}-{tray}-{gpu}", index=gpu) for gpu in range(fleet.gpus)),
            )
            for tray in range(fleet.trays)
        )
        built.append(Rack(serial=f"{rack:05}", trays=trays, fabric=("fabric",)))
        cliques.append(Clique(id=CliqueId(f"{rack:05}", 1), gpus=tuple(gpu.uuid for t in trays for gpu in t.gpus)))
    return PlacementArrays(Topology.of(built, cliques))
