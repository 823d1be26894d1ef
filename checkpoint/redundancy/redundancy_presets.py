"""Parse redundancy presets such as ``xor:8@tray``, as a command line has them, and make evenly spread labels.

``local``; ``mirror:tray`` (two copies), ``mirror:3@rack``; ``xor:8@tray`` (sets of 8); ``rs:8+2@tray`` (sets of 10, any
two of which may be lost). A bare ``mirror`` or ``xor`` means two copies or sets of 8, over trays.
"""

from __future__ import annotations

import re

from rackrun.checkpoint.redundancy.shard_placement import LEVELS, Labels, Level, PlacementError, Redundancy

__all__ = ["even_labels", "redundancy_of"]

_PRESET = re.compile(r"(?:(mirror|xor)(?::(\d{1,6}))?|rs:(\d{1,6})\+(\d{1,6}))(?:[:@]([a-z]+))?", re.ASCII)


def redundancy_of(text: str) -> Redundancy:
    """Parse a preset. Raises `PlacementError` for text that is none."""
    if text in ("local", "none"):
        return Redundancy.local()
    match = _PRESET.fullmatch(text)
    if match is None or match[5] not in (None, *LEVELS):
        raise PlacementError(
            f"{text!r} is not a redundancy that rackrun knows.",
            remedy=f"Use local, mirror[:COPIES][@LEVEL], xor[:SIZE][@LEVEL] or rs:N+M[@LEVEL], with one of {', '.join(LEVELS)}.",
        )
    across: Level = next((level for level in LEVELS if level == match[5]), "tray")
    if match[3]:
        return Redundancy.rs(int(match[3]), int(match[4]), across)
    if match[1] == "mirror":
        return Redundancy.mirror(int(match[2] or 2), across)
    return Redundancy.xor(int(match[2] or 8), across)


def even_labels(world_size: int, trays: int, racks: int = 1) -> dict[int, Labels]:
    """Return labels that spread ranks over trays, and trays over racks, in blocks that differ by one at most.

    Raises `PlacementError` for more trays than ranks, or more racks than trays.
    """
    if not 1 <= racks <= trays <= world_size:
        raise PlacementError(
            f"{world_size} ranks cannot be on {trays} tray(s) in {racks} rack(s).",
            remedy="Give every rack a tray and every tray a rank.",
        )
    labels = {}
    for rank in range(world_size):
        tray = rank * trays // world_size
        rack = tray * racks // trays
        labels[rank] = Labels(tray=f"rack-{rack}/tray-{tray}", rack=f"rack-{rack}")
    return labels
