"""Description of a tray when it joins, from the driver and from the rack file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackrun.agent.gpus.gpu_verdicts import cliques_of
from rackrun.topology.gpu_driver.readings import TrayReading
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.partial_topology import FoundTray, PartialTopology, partial_of_reading

__all__ = ["by_driver", "is_of", "named_cliques", "reconciled"]


def by_driver(reading: TrayReading, tray: str, gpus: Sequence[int]) -> PartialTopology:
    """Return the GPUs that have a slot, numbered as slots. The host has the tray's name, by which sources are
    merged."""
    found = partial_of_reading(reading, tray)
    by_index = {gpu.index: gpu for gpu in found.trays[0].gpus}
    cliques = cliques_of(reading, gpus)
    here = tuple(
        msgspec.structs.replace(by_index[gpu], index=slot, clique=cliques.get(slot))
        for slot, gpu in enumerate(gpus)
        if gpu in by_index
    )
    late = [slot for slot, clique in cliques.items() if gpus[slot] in by_index and by_index[gpus[slot]].clique is None]
    notes = tuple(f"slot {slot} has not registered yet, and is taken for one of {cliques[slot]}" for slot in late)
    tray_found = msgspec.structs.replace(found.trays[0], gpus=here)
    return msgspec.structs.replace(found, trays=(tray_found,), notes=found.notes + notes)


def is_of(reading: TrayReading, files: Sequence[PartialTopology]) -> bool:
    """Return whether the driver lists a GPU that the file names. A simulated tray has only those."""
    listed = {gpu.uuid for gpu in reading.gpus}
    return any(gpu.uuid in listed for file in files for tray in file.trays for gpu in tray.gpus)


def reconciled(files: Sequence[PartialTopology], driver: PartialTopology) -> list[PartialTopology]:
    """Return all descriptions, the driver's first. UUIDs that the file has made up are replaced by the driver's."""
    if not files:
        return [driver]
    from rackrun.topology.model.rack_file import made_up_uuid  # imports a YAML parser: only needed with a file

    known = {gpu.index for tray in driver.trays for gpu in tray.gpus}

    def modest(tray: FoundTray) -> FoundTray:
        gpus = tuple(
            msgspec.structs.replace(gpu, uuid="")
            if gpu.index in known and gpu.uuid == made_up_uuid(tray.rack, tray.index or 0, gpu.index)
            else gpu
            for gpu in tray.gpus
        )
        return msgspec.structs.replace(tray, gpus=gpus)

    return [driver, *(msgspec.structs.replace(file, trays=tuple(map(modest, file.trays))) for file in files)]


def named_cliques(files: Sequence[PartialTopology]) -> dict[int, CliqueId]:
    """Return the cliques that the slots should join, as far as the files name them."""
    trays = [tray for file in files for tray in file.trays]
    return {gpu.index: clique for tray in trays for gpu in tray.gpus if (clique := gpu.clique or tray.clique)}
