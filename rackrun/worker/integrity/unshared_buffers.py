"""Buffers that replicas do not share: BatchNorm's running statistics under DDP are each rank's own, and rank 0's count.

They die with their rank, so every rank hands a copy of its own to all others *before it enters the gate*. If the gate
passes for anyone then everybody has everybody's copies: they are exactly as durable as the unit. A newcomer copies a
replica, and then puts its own row of them in place. Where they change again after the gate (in an average of the weights, say), the
gate comes at the end of the step from then on. Which buffers differ is known when replicas have been compared, in the second step;
until then all of them are handed around. This is for small things; what is larger than `ROW_BYTES_MAX` a rank has no live
copy, and is kept by snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rackrun.errors import StepError
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_without_address
from rackrun.worker.tensors.tensor_bytes import copy_bytes, pack

if TYPE_CHECKING:
    from rackrun.worker.membership.worker_membership import World

__all__ = ["ROW_BYTES_MAX", "UniqueBuffers"]

ROW_BYTES_MAX = 4 * 2**20
"""Of one rank. Every rank holds two times that of every rank."""


class UniqueBuffers:
    """Tracked like what the user tracks, under a name of its own: so it travels to newcomers and into snapshots."""

    def __init__(self, state: TrackedState, world: World) -> None:
        self._state, self._world = state, world
        self._chosen: tuple[str, ...] = ()
        """Paths of what the next exchange is of."""
        self._row_bytes = 0
        self.whole_bytes = 0
        """The most that the buffers of any rank take, all of them: known once ranks were compared."""
        self._paths: tuple[str, ...] = ()
        """Of what `_kept` holds."""
        self._kept: torch.Tensor | None = None
        """One row of bytes a rank, as they were at the end of the last committed unit."""
        self._coming: torch.Tensor | None = None
        self._row: torch.Tensor | None = None

    def choose(self, paths: Sequence[str], row_bytes: int) -> None:
        """These are this rank's own, from the next exchange on. ``row_bytes`` is the most that any rank has; 0 ends the exchange. What is
        kept of the last unit stays until the next one is committed: the unit in hand may be discarded."""
        self._chosen, self._row_bytes, self._coming = tuple(paths), row_bytes, None

    @property
    def exchanges(self) -> bool:
        return self._row_bytes > 0

    def exchange(self) -> None:
        """Collective over the world, right before a gate. If it breaks, the gate will not be entered."""
        if not self._row_bytes:
            return
        row = torch.zeros(self._row_bytes, dtype=torch.uint8, device=self._world.device)
        packed = pack(self._buffers(self._chosen), self._world.device)
        if len(packed) > len(row):
            raise StepError(
                f"buffers of tracked modules have grown in a step, from {len(row)} bytes to {len(packed)}: a process that takes a rank over has them "
                "as main makes them.",
                remedy="make them in main in their full size, and count what is filled in a buffer of its own.",
            )
        row[: len(packed)] = packed
        rows = torch.empty(self._world.size * self._row_bytes, dtype=torch.uint8, device=self._world.device)
        self._world.groups[0].all_gather_single(rows, row).wait()
        self._coming, self._row = rows.view(self._world.size, -1), packed

    def committed(self) -> bool:
        """The unit is committed: what was exchanged counts. False when it is out of date already, because something
        has changed one of the buffers after the gate."""
        if self._coming is None or self._row is None:
            if not self._row_bytes:
                self._paths, self._kept = (), None
            return True
        self._paths, self._kept, self._coming = self._chosen, self._coming, None
        return torch.equal(self._row, pack(self._buffers(self._paths), self._world.device))

    def discarded(self) -> None:
        self._coming = None

    def resized(self, origins: Sequence[int | None]) -> None:
        """The world has other ranks: for each, which one it was. What joins now gets a row with the next exchange."""
        if self._kept is not None:
            self._kept = torch.stack([self._kept[origin or 0] for origin in origins])
        self._coming = None

    def take_place(self, rank: int) -> None:
        """A newcomer holds a replica's buffers, and the rows: its own row is what it goes on with."""
        if self._kept is not None:
            copy_bytes(self._kept[rank], self._buffers(self._paths))

    # -- tracked state
    def state_dict(self) -> dict[str, Any]:
        rows = {} if self._kept is None else {"rows": self._kept}
        return {
            "chosen": list(self._chosen),
            "row_bytes": self._row_bytes,
            "whole_bytes": self.whole_bytes,
            "paths": list(self._paths),
            **rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._paths, self._row_bytes, self._coming = tuple(state["paths"]), state["row_bytes"], None
        self._chosen = tuple(state.get("chosen", self._paths))
        self.whole_bytes = state.get("whole_bytes", 0)
        self._kept = state["rows"].to(self._world.device) if "rows" in state else None

    def _buffers(self, paths: Sequence[str]) -> list[torch.Tensor]:
        buffers = self._state.buffers()
        found = [buffers[path] for path in paths]
        refuse_without_address(paths, found, list(map(torch.Tensor.data_ptr, found)))
        return found
