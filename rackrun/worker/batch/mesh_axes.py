"""Finds the axes of ``run.mesh`` and their sizes, from the script or from the launcher (``rackrun --mesh``).

When the world has another number of ranks than at the start, the first data-parallel axis takes what the other axes
leave, whatever size it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rackrun.core.placement import mesh_resize
from rackrun.core.placement.mesh_resize import Axes
from rackrun.errors import UsageError
from rackrun.topology.model.mesh import DATA_AXES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "MESH_VARIABLE",
    "MIN_RANKS_VARIABLE",
    "Axes",
    "axes_of",
    "data_coordinate",
    "fitted",
    "ranks_of_one_loss",
    "unfit_because",
]

MESH_VARIABLE = "RACKRUN_MESH"
"""Environment variable that the launcher sets, such as ``dp=16,tp=4``."""
MIN_RANKS_VARIABLE = "RACKRUN_MIN_RANKS"
"""Environment variable that the launcher sets: the fewest ranks that the world may shrink to; 0: it may not."""


def axes_of(
    script: Mapping[str, int] | None, world_size: int, environment: Mapping[str, str], *, changed: bool = False
) -> Axes:
    """Return the axes with all sizes known; () when neither script nor launcher names any.

    ``changed``: the world may have another number of ranks by now than script and launcher assume. Raises `UsageError`
    when both name axes that are not the same.
    """
    text = environment.get(MESH_VARIABLE, "")
    if not text:
        axes = _closed(script or {}, world_size)
        return fitted(axes, world_size) if changed else axes
    told = tuple(_parse(text).items())
    at_start = math.prod(size for _, size in told) if changed else world_size
    if script and _closed(script, at_start) != told:
        asked = ",".join(f"{name}={size}" for name, size in script.items())
        raise UsageError(
            f"the script asks for mesh {asked}, but the job was started with --mesh {text} ({world_size} ranks).",
            remedy="give the same axes in the same order to both, or leave one of them out.",
        )
    return fitted(told, world_size) if changed else told


def data_coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks of ``mesh``, and their number."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a mesh over the whole world holds every rank"
    assert mesh.mesh_dim_names is not None, "it was made with names"
    index, size = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names):
        if name in DATA_AXES:
            index, size = index * mesh.size(axis) + coordinate[axis], size * mesh.size(axis)
    return index, size


def fitted(axes: Axes, world_size: int) -> Axes:
    """Return ``axes`` fitted to ``world_size`` ranks. Raises `UsageError` when that is impossible."""
    found = mesh_resize.fitted(axes, world_size) if axes else axes
    if axes and not found:
        told = ",".join(f"{name}={size}" for name, size in axes)
        raise UsageError(
            f"a mesh {told} cannot be fitted to {world_size} ranks.",
            remedy="let the world have a multiple of what the axes other than the first data-parallel one take.",
        )
    return found


def unfit_because(axes: Axes, script: Mapping[str, int] | None) -> str:
    """Return why a script with these axes must keep its number of ranks, for a message; "" when nothing holds it."""
    elastic = mesh_resize.data_axis(axes)
    if any(name == "pp" for name, _ in axes):
        return "stages of a pipeline hold other layers each"
    if axes and elastic is None:
        return f"no axis of its mesh ({', '.join(name for name, _ in axes)}) splits the data"
    still_open = [name for name, size in (script or {}).items() if size < 0]
    if still_open and elastic is not None and still_open[0] != axes[elastic][0]:
        return f"its mesh leaves axis {still_open[0]} open: to change, it would have to be {axes[elastic][0]}"
    return ""


def ranks_of_one_loss(axes: Axes) -> int:
    """Return how many ranks compute the loss of the same samples: along axes such as "tp". Of the stages of a pipeline
    only the last one has a loss."""
    return math.prod(size for name, size in axes if name not in DATA_AXES and name != "pp")


def _closed(mesh: Mapping[str, int], world_size: int) -> Axes:
    """Return the axes with the open one set to what the others leave."""
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
