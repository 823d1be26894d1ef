"""``--snapshot-copies``: which of the presets of `rackrun.checkpoint` the runtime can give."""

from __future__ import annotations

import re

from rackrun.checkpoint.placement import PlacementError, Redundancy
from rackrun.checkpoint.presets import redundancy_of
from rackrun.errors import UsageError

__all__ = ["redundancy"]


def redundancy(text: str, trays: int) -> Redundancy:
    """Over trays, of which there are ``trays`` at the most; two copies; sets that there are trays for. UsageError for the rest."""
    asked = f"--snapshot-copies {text}"
    try:
        found = redundancy_of(text)
    except PlacementError as error:
        raise UsageError(f"{asked}: {error.what}", remedy="give local, mirror, xor or xor:N.") from error
    if found.kind == "local":
        return found
    if found.across != "tray":
        raise UsageError(
            f"{asked}: the level is tray, not {found.across}.",
            remedy=f"give {found.kind}; with several hosts copies go to other hosts anyway.",
        )
    if found.kind == "mirror" and found.width != 2:
        raise UsageError(
            f"{asked}: {found.width} copies are not kept; there are two, the owner's own included.",
            remedy="give mirror, and --checkpoint-dir against the loss of two trays.",
        )
    least = found.width if re.search(r"\d", text) else 2
    if found.kind == "xor" and trays < least:
        fewer = f"give xor:{trays}, or xor for as many as there are" if trays > 1 else "leave it out"
        raise UsageError(
            f"{asked}: sets of {least} need as many trays, and there {'are' if trays > 1 else 'is'} {trays}.",
            remedy=f"{fewer}; or raise --nnodes or --trays.",
        )
    return found
