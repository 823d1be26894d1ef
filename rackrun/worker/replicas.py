"""Which ranks hold the same state: a replica is checked, not assumed.

A rank's *replica class* is a hash of what its parameters are (names, shapes, shards) and of what they, and the optimizer's
state, contain, bit for bit. It is taken twice: at the start, and right after the first step, when an optimizer has state
(ZeRO keeps its only on one rank) and two stages of a pipeline that began alike have parted. Ranks of one class can restore
each other. A class of one has no live copy: its state is snapshotted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rackrun.core.ids import BEGIN, Position
from rackrun.worker.state import Manifest, TrackedState

if TYPE_CHECKING:
    from rackrun.worker.world import World

__all__ = ["ReplicaCheck"]


class ReplicaCheck:
    def __init__(self, state: TrackedState, world: World) -> None:
        self._state, self._world = state, world
        self.some_are_unique = False
        """Some rank's state has no live copy: all ranks take snapshots, because all have to go back together."""

    def at_start(self) -> str:
        """The class before the first step: nothing is committed, so equal content is an equal state."""
        return f"start {self._state.layout()} {self._state.content()}"

    def due(self, at: Position) -> bool:
        """Compare in the second unit of the run: the same one for everybody, whoever joined when."""
        if self._world.passed == BEGIN or self._world.size == 1:
            return False
        return self._world.passed == Position(0) and at > Position(0)

    def compare(self) -> None:
        """Collective over the world. Sets this rank's class, and whether some rank is alone in its own."""
        mine = torch.tensor([int(self._state.layout(), 16) % 2**62, self._state.content()], dtype=torch.int64, device=self._world.device)
        everyone = [torch.zeros_like(mine) for _ in range(self._world.size)]
        dist.all_gather(everyone, mine)
        if self._world.broken:
            return  # the unit will be repeated, and this with it
        classes = Counter(tuple(row.tolist()) for row in everyone)
        self.some_are_unique = min(classes.values()) == 1
        layout, content = mine.tolist()
        self._world.replica_class = f"{layout:x} {content:x}{' alone' if self.some_are_unique else ''}"

    def adopt(self, manifest: Manifest) -> None:
        """A newcomer is what its source was."""
        self._world.replica_class = manifest.replica_class
        self.some_are_unique = manifest.replica_class.endswith(" alone")
