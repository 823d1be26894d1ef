"""Detects whether ranks with different samples share collectives in every micro-batch.

FSDP2's ranks do: each forward pass gathers shards. DDP's ranks share collectives once a step: in the last backward
pass, which reduces gradients, and in the first forward pass, which broadcasts buffers. Only without collectives in
every micro-batch may one rank compute more micro-batches than another without ghosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.core.placement.mesh_resize import Axes
from rackrun.core.stragglers.shares import sharing
from rackrun.errors import StepError

__all__ = ["MicrobatchCollectives"]


class MicrobatchCollectives:
    """The collectives of the current unit. ``axes``: of the mesh. Ranks along axes that do not split the data have the
    same samples, and may share collectives."""

    def __init__(self, axes: Axes = (), world_size: int = 0) -> None:
        together = sharing(axes, world_size) if len(axes) > 1 else []
        self._place = {rank: place for place, ranks in enumerate(together) for rank in ranks}
        self._pass = 0
        self.checks = False
        """Whether to check collectives: a micro-batch that is not the last is being computed, and none was detected
        yet."""
        self.detected = False

    def begin_unit(self) -> None:
        """Forget what was seen in the unit before."""
        self._pass, self.checks, self.detected = 0, False, False

    def begin_microbatch(self, *, last: bool) -> None:
        """Begin the next micro-batch. ``last``: it is this rank's last of the step."""
        self._pass += 1
        self.checks = not last and not self.detected

    def stop(self) -> None:
        """Stop checking, before the gate."""
        self.checks = False

    def check_collective(self, name: str, ranks: Sequence[int], *, uneven: bool) -> None:
        """Note a collective while `checks` holds. Raises `StepError` if ranks with different samples share it and have
        ``uneven`` numbers of micro-batches, because the others would not come."""
        if (name == "broadcast" and self._pass == 1) or len({self._place.get(rank, rank) for rank in ranks}) < 2:
            return
        self.detected, self.checks = True, False
        if uneven:
            raise StepError(
                f"a collective ({name}) was called in a micro-batch, and a slow rank has fewer micro-batches than the others, "
                "so not all ranks would call it.",
                remedy="use --slow-ranks notice or swap; or call the collective once a step, outside the micro-batches.",
            )
