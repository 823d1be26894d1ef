"""Which GPU belongs to which slot: slot *i* of a tray has the *i*-th GPU that its workers see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rackrun.topology.gpu_driver.readings import TrayReading

__all__ = ["VisibleGpus", "visible_gpus"]


class VisibleGpus(NamedTuple):
    """GPUs that workers see."""

    gpus: tuple[int, ...]
    """The GPU of each slot, by NVML's index. A slot beyond the end has none: its worker computes elsewhere."""
    note: str = ""
    """Why some or all are left out."""
    shown: int | None = None
    """Number of GPUs that CUDA shows to a worker, watched or not; None: not known."""
    slices: bool = False
    """Whether CUDA_VISIBLE_DEVICES names slices of GPUs (MIG)."""


def visible_gpus(reading: TrayReading, environment: Mapping[str, str], slots: int) -> VisibleGpus:
    """Return the first ``slots`` GPUs that CUDA will show to workers with this environment.

    CUDA_VISIBLE_DEVICES holds indices or beginnings of UUIDs. CUDA reads it up to the first invalid entry, and shows
    nothing if an entry occurs twice. Indices are NVML's under CUDA_DEVICE_ORDER=PCI_BUS_ID, which workers get. A slice
    of a GPU (MIG) does not count as a GPU: its tray is not watched.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [entry.strip() for entry in wanted.split(",")] if wanted is not None else []
    if any(entry.startswith("MIG-") for entry in entries):
        return VisibleGpus(
            (), "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG), whose health is not watched", 1, slices=True
        )
    by_uuid = bool(entries) and all(entry.startswith("GPU-") for entry in entries)
    order = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID" and not by_uuid and len({gpu.name for gpu in reading.gpus}) > 1:
        return VisibleGpus(
            (),
            f"CUDA_DEVICE_ORDER={order} leaves it open which GPU is whose: their health is not watched",
            len(reading.gpus) if wanted is None else None,
        )
    if wanted is None:
        return VisibleGpus(tuple(gpu.index for gpu in reading.gpus)[:slots], shown=len(reading.gpus))
    found: list[int] = []
    note = ""
    for entry in entries if wanted.strip() else ():
        index = _index_of(entry, reading)
        if index is None:
            note = f"CUDA_VISIBLE_DEVICES names {entry!r}, which the driver does not list"
            break
        found.append(index)
    if len(set(found)) < len(found):
        return VisibleGpus((), f"CUDA_VISIBLE_DEVICES={wanted} names a GPU twice, and so CUDA shows none", 0)
    return VisibleGpus(tuple(found)[:slots], note, len(found))


def _index_of(entry: str, reading: TrayReading) -> int | None:
    if entry.startswith("GPU-"):
        found = [gpu.index for gpu in reading.gpus if gpu.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None
    known = {str(gpu.index): gpu.index for gpu in reading.gpus}
    return known.get(entry)
