"""Parsing of ``--snapshot-copies``: the presets of `rackrun.checkpoint` that the runtime supports."""

from __future__ import annotations

import re

from rackrun.checkpoint.redundancy import isal
from rackrun.checkpoint.redundancy.redundancy_presets import redundancy_of
from rackrun.checkpoint.redundancy.shard_placement import PlacementError, Redundancy
from rackrun.errors import UsageError

__all__ = ["redundancy"]


def redundancy(text: str, trays: int) -> Redundancy:
    """Return the redundancy over at most ``trays`` trays. Raises UsageError for other than two copies, for sets with
    too few trays, and without the codec."""
    asked = f"--snapshot-copies {text}"
    try:
        found = redundancy_of(text)
    except PlacementError as error:
        raise UsageError(f"{asked}: {error.what}", remedy="give local, mirror, xor, xor:N or rs:N+M.") from error
    if found.kind == "local":
        return found
    if found.across != "tray":
        raise UsageError(
            f"{asked}: copies are placed across trays here; the level {found.across} is not possible.",
            remedy=f"give {re.sub(r'[:@][a-z]+$', '', text)}; with several hosts copies go to other hosts anyway.",
        )
    if found.kind == "mirror" and found.width != 2:
        raise UsageError(
            f"{asked}: {found.width} copies are not kept; there are two, the owner's own included.",
            remedy="give mirror, and --checkpoint-dir against the loss of two trays.",
        )
    least = found.width if re.search(r"\d", text) else 2
    if found.kind in ("xor", "rs") and trays < least:
        fewer = f"give xor:{trays}, or xor for as many as there are" if trays > 1 else "leave it out"
        if found.kind == "rs" and trays > found.parity + 1:
            fewer = f"give rs:{trays - found.parity}+{found.parity}"
        raise UsageError(
            f"{asked}: sets of {least} need as many trays, and there {'are' if trays > 1 else 'is'} {trays}.",
            remedy=f"{fewer}; or raise --nnodes or --trays.",
        )
    if found.parity > 1:
        try:
            isal.check()
        except isal.CodecMissing as missing:
            raise UsageError(f"{asked}: {missing.what}", remedy=missing.remedy) from missing
    return found
