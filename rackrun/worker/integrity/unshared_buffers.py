"""Keeps copies of buffers that replicas do not share, such as BatchNorm's running statistics under DDP.

Such buffers are each rank's own (under DDP rank 0's are those that count) and are lost with it. So every rank sends a
copy of its own to all others *before it enters the gate*. If the gate passes for any rank, then all ranks have all
copies, which are exactly as durable as the unit. A newcomer copies a replica, and then puts its own row of the copies
in place. Where buffers change again after the gate (in an average of the weights, say), the gate comes at the end of
the step from then on. Which buffers differ is known once replicas have been compared, in the second step; until then
all are exchanged. This is for small buffers. For more than `ROW_BYTES_MAX` a rank has no live copy, and is kept by
snapshots.
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
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["ROW_BYTES_MAX", "UniqueBuffers"]

ROW_BYTES_MAX = 4 * 2**20
"""The most bytes that one rank exchanges. Every rank holds twice that for each rank."""


class UniqueBuffers:
    """The copies of all ranks' own buffers. Tracked under a name of its own, so that it reaches newcomers and
    snapshots."""

    def __init__(self, state: TrackedState, world: WorkerMembership) -> None:
        self._state, self._world = state, world
        self._chosen: tuple[str, ...] = ()
        """Paths of the buffers in the next exchange."""
        self._row_bytes = 0
        self.whole_bytes = 0
        """The largest size of all buffers of any rank, in bytes; known once ranks were compared."""
        self._paths: tuple[str, ...] = ()
        """Paths of the buffers in `_kept`."""
        self._kept: torch.Tensor | None = None
        """One row of bytes for each rank (uint8, ranks x bytes), from the end of the last committed unit; None without
        an exchange."""
        self._coming: torch.Tensor | None = None
        self._row: torch.Tensor | None = None

    def choose(self, paths: Sequence[str], row_bytes: int) -> None:
        """Exchange the buffers at ``paths``, which are this rank's own, from the next exchange on.

        ``row_bytes``: the most that any rank has; 0 ends the exchange. The rows of the last unit stay until the next
        one is committed, because the current unit may be discarded.
        """
        self._chosen, self._row_bytes, self._coming = tuple(paths), row_bytes, None

    @property
    def exchanges(self) -> bool:
        """Whether buffers are exchanged."""
        return self._row_bytes > 0

    def exchange(self) -> None:
        """Exchange the buffers right before a gate. Collective over the world. If it breaks, the gate will not be
        entered. Raises `StepError` when buffers have grown."""
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
        """Keep what was exchanged, as the unit is committed. Returns False when it is out of date already, because a
        buffer has changed after the gate."""
        if self._coming is None or self._row is None:
            if not self._row_bytes:
                self._paths, self._kept = (), None
            return True
        self._paths, self._kept, self._coming = self._chosen, self._coming, None
        return torch.equal(self._row, pack(self._buffers(self._paths), self._world.device))

    def discarded(self) -> None:
        """Drop what was exchanged, as the unit is discarded."""
        self._coming = None

    def resized(self, origins: Sequence[int | None]) -> None:
        """Reorder the rows for a world with other ranks. ``origins``: each rank's former rank, or None for one that
        joins now and gets its row with the next exchange."""
        if self._kept is not None:
            self._kept = torch.stack([self._kept[origin or 0] for origin in origins])
        self._coming = None

    def take_place(self, rank: int) -> None:
        """Load this rank's own row into its buffers, on a newcomer that holds a replica's buffers."""
        if self._kept is not None:
            copy_bytes(self._kept[rank], self._buffers(self._paths))

    # -- tracked state
    def state_dict(self) -> dict[str, Any]:
        """Return the choice of buffers, and every rank's row of them if rows are kept."""
        rows = {} if self._kept is None else {"rows": self._kept}
        return {
            "chosen": list(self._chosen),
            "row_bytes": self._row_bytes,
            "whole_bytes": self.whole_bytes,
            "paths": list(self._paths),
            **rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`; rows move to this rank's device. Its own row is loaded by `take_place`."""
        self._paths, self._row_bytes, self._coming = tuple(state["paths"]), state["row_bytes"], None
        self._chosen = tuple(state.get("chosen", self._paths))
        self.whole_bytes = state.get("whole_bytes", 0)
        self._kept = state["rows"].to(self._world.device) if "rows" in state else None

    def _buffers(self, paths: Sequence[str]) -> list[torch.Tensor]:
        buffers = self._state.buffers()
        found = [buffers[path] for path in paths]
        refuse_without_address(paths, found, list(map(torch.Tensor.data_ptr, found)))
        return found
