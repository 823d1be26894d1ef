"""Whether ranks with different samples meet in collectives of every micro-batch.

FSDP2's do: each forward gathers shards. DDP's meet once a step, in the last backward, which reduces the gradients, and in the first
forward, which broadcasts buffers. Only where they do not may one rank compute more micro-batches than another without ghosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.core.placement.mesh_resize import Axes
from rackrun.core.stragglers.shares import sharing
from rackrun.errors import StepError

__all__ = ["Meetings"]


class Meetings:
    """Of the unit in hand. ``axes``: of the mesh; ranks along the other axes than those of data share their samples, and may meet."""

    def __init__(self, axes: Axes = (), world_size: int = 0) -> None:
        together = sharing(axes, world_size) if len(axes) > 1 else []
        self._place = {rank: place for place, ranks in enumerate(together) for rank in ranks}
        self._pass = 0
        self.looks = False
        """A micro-batch is under way that is not the last; and nothing was seen yet."""
        self.seen = False

    def begin_unit(self) -> None:
        self._pass, self.looks, self.seen = 0, False, False

    def next_pass(self, *, last: bool) -> None:
        self._pass += 1
        self.looks = not last and not self.seen

    def over(self) -> None:
        """The gate comes."""
        self.looks = False

    def called(self, name: str, ranks: Sequence[int], *, uneven: bool) -> None:
        """A collective, while it `looks`. Raises `StepError` where ranks have ``uneven`` numbers of micro-batches, and meet all the same:
        the others would not come."""
        if (name == "broadcast" and self._pass == 1) or len({self._place.get(rank, rank) for rank in ranks}) < 2:
            return
        self.seen, self.looks = True, False
        if uneven:
            raise StepError(
                f"a collective ({name}) was called in a micro-batch, while a slow rank has fewer of them than the others.",
                remedy="use --slow-ranks notice or swap; or call it once a step.",
            )
