"""The axes of ``run.mesh``, with their sizes: as the script asks for them, or as the launcher was told (``rackrun --mesh``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from rackrun.errors import UsageError

__all__ = ["MESH_VARIABLE", "Axes", "axes_of"]

Axes: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes, in order, the last axis the fastest."""

MESH_VARIABLE = "RACKRUN_MESH"
"""Set by the launcher: ``dp=16,tp=4``."""


def axes_of(script: Mapping[str, int] | None, world_size: int, environment: Mapping[str, str]) -> Axes:
    """None of them open. () when neither script nor launcher names any.

    Raises `UsageError` when both do, and not the same.
    """
    text = environment.get(MESH_VARIABLE, "")
    if not text:
        return _closed(script or {}, world_size)
    told = _closed(_parse(text), world_size)
    if script and _closed(script, world_size) != told:
        asked = ",".join(f"{name}={size}" for name, size in script.items())
        raise UsageError(
            f"the script asks for mesh {asked}, but the job was started with --mesh {text} ({world_size} ranks).",
            remedy="give the same axes in the same order to both, or leave one of them out.",
        )
    return told


def _closed(mesh: Mapping[str, int], world_size: int) -> Axes:
    """The open axis has what the others leave."""
    known = 1
    for size in mesh.values():
        known *= size if size > 0 else 1
    return tuple((name, size if size > 0 else world_size // known) for name, size in mesh.items())


def _parse(text: str) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or name in axes or not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"{MESH_VARIABLE}={text!r} is not AXIS=SIZE,AXIS=SIZE: {part!r}.",
                remedy="unset it, and say --mesh to rackrun.",
            )
        axes[name] = int(size)
    return axes
