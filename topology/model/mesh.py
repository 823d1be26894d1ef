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
"""Ranks that differ along these have different samples. Along others they share them."""
BOUND = ("tp", "ep")
"""Tensor and expert parallelism talk in every layer: over the network they crawl. The others cross it once a micro-batch or step."""


class Mesh(msgspec.Struct, frozen=True, dict=True):
    """Ranks are row-major, the last axis the fastest, as in torch's ``init_device_mesh``.

    The ranks that differ only along bound axes are a *bound group*: all of it sits in one clique.
    """

    axes: tuple[tuple[str, int], ...]
    bound: tuple[str, ...]
    """Those of ``axes`` that are bound, in their order."""

    @classmethod
    def of(cls, axes: Mapping[str, int], bound: Iterable[str] | None = None) -> Mesh:
        """``axes`` in order, such as ``{"pp": 2, "dp": 8, "tp": 4}``. ``bound``: `BOUND`, as far as the mesh has them.

        Raises `TopologyError`.
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
        """(groups, group_size): the ranks of each bound group. Groups are in row-major order of the free axes."""
        ranks = np.arange(self.world_size).reshape(self.shape)
        last = [at for at in range(len(self.axes)) if at not in self.free]
        return ranks.transpose([*self.free, *last]).reshape(-1, self.group_size)

    @cached_property
    def columns(self) -> Ints:
        """(group_size, groups): `groups` the other way round, which is faster to reduce."""
        return np.ascontiguousarray(self.groups.T)

    @cached_property
    def group_of(self) -> Ints:
        """(world_size,): the bound group of each rank."""
        found = np.empty(self.world_size, np.int64)
        found[self.groups] = np.arange(len(self.groups))[:, None]
        return found

    @cached_property
    def lines(self) -> Ints:
        """(lines, stages): the groups that follow each other along ``pp``, one row for each place on the other free axes."""
        grid = np.arange(len(self.groups)).reshape([self.shape[at] for at in self.free])
        for order, at in enumerate(self.free):
            if self.axes[at][0] == "pp":
                return np.moveaxis(grid, order, -1).reshape(-1, self.shape[at])
        return grid.reshape(-1, 1)

    def neighbours(self, group: int) -> tuple[list[int], list[int]]:
        """The groups before and after ``group``: along ``pp``, and along the other free axes."""
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
        found = np.unravel_index(rank, self.shape) if self.shape else ()
        return tuple((name, int(at)) for (name, _), at in zip(self.axes, found, strict=True))
