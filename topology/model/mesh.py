"""The axes of a mesh, and which of them must stay inside one clique."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from rackrun.topology.model.errors import TopologyError

__all__ = ["BOUND", "DATA_AXES", "Ints", "Mesh"]

Ints = npt.NDArray[np.int64]
DATA_AXES = ("dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp")
"""Ranks that differ along these axes have different samples. Ranks that differ along other axes share them."""
BOUND = ("tp", "ep")
"""Axes bound to a clique by default.

Tensor and expert parallelism communicate in every layer, which is too slow over the network. The other axes communicate
once for each micro-batch or step.
"""


class Mesh(msgspec.Struct, frozen=True, dict=True):
    """A mesh of ranks in row-major order: the last axis varies fastest, as in torch's ``init_device_mesh``.

    The ranks that differ only along bound axes are a *bound group*, which must be inside one clique.
    """

    axes: tuple[tuple[str, int], ...]
    bound: tuple[str, ...]
    """The names of the bound axes, in the order of ``axes``."""

    @classmethod
    def of(cls, axes: Mapping[str, int], bound: Iterable[str] | None = None) -> Mesh:
        """Return the mesh of ``axes``, in order, such as ``{"pp": 2, "dp": 8, "tp": 4}``.

        ``bound``: names of the bound axes; None for those of `BOUND` that the mesh has. Raises `TopologyError` for a
        size below 1, or a bound axis that the mesh does not have.
        """
        for name, size in axes.items():
            if size < 1:
                raise TopologyError(
                    f"axis {name} of the mesh has size {size}.", remedy="give every axis a size of 1 or more."
                )
        wanted = tuple(name for name in BOUND if name in axes) if bound is None else tuple(bound)
        for name in wanted:
            if name not in axes:
                raise TopologyError(
                    f"axis {name!r} is bound to a clique, but the mesh has only {', '.join(axes) or 'no axes'}.",
                    remedy="bind axes of the mesh.",
                )
        return cls(tuple(axes.items()), tuple(name for name in axes if name in wanted))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Positions of the axes that are not bound."""
        return tuple(at for at, (name, _) in enumerate(self.axes) if name not in self.bound)

    @cached_property
    def group_size(self) -> int:
        return math.prod(size for name, size in self.axes if name in self.bound)

    @cached_property
    def groups(self) -> Ints:
        """The ranks of each bound group: int64[groups, group_size]. Groups are in row-major order of the free axes."""
        ranks = np.arange(self.world_size).reshape(self.shape)
        last = [at for at in range(len(self.axes)) if at not in self.free]
        return ranks.transpose([*self.free, *last]).reshape(-1, self.group_size)

    @cached_property
    def columns(self) -> Ints:
        """`groups` transposed, int64[group_size, groups]: faster to reduce."""
        return np.ascontiguousarray(self.groups.T)

    @cached_property
    def group_of(self) -> Ints:
        """The bound group of each rank: int64[world_size]."""
        found = np.empty(self.world_size, np.int64)
        found[self.groups] = np.arange(len(self.groups))[:, None]
        return found

    @cached_property
    def lines(self) -> Ints:
        """The groups that follow each other along ``pp``: int64[lines, stages].

        There is a row for each place on the other free axes.
        """
        grid = np.arange(len(self.groups)).reshape([self.shape[at] for at in self.free])
        for order, at in enumerate(self.free):
            if self.axes[at][0] == "pp":
                return np.moveaxis(grid, order, -1).reshape(-1, self.shape[at])
        return grid.reshape(-1, 1)

    def neighbours(self, group: int) -> tuple[list[int], list[int]]:
        """Return the groups next to ``group``: those along ``pp``, and those along the other free axes."""
        sizes = [self.shape[at] for at in self.free]
        along_pp: list[int] = []
        others: list[int] = []
        stride = 1
        for at, size in zip(reversed(self.free), reversed(sizes), strict=True):
            found = along_pp if self.axes[at][0] == "pp" else others
            place = group // stride % size
            found += [group - stride] * (place > 0) + [group + stride] * (place < size - 1)
            stride *= size
        return along_pp, others

    def coordinate(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Return (axis, index) of a rank for each axis."""
        found = np.unravel_index(rank, self.shape) if self.shape else ()
        return tuple((name, int(at)) for (name, _), at in zip(self.axes, found, strict=True))
