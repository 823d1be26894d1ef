"""One worker of the model of a job, with what it has in memory and what is on its way to it and from it.

Training state is a chain of the units that were applied, each with the generation whose gate it passed: if two members
ever took different histories for the same, their chains differ for good.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rackrun.protocol.commands import Command, GenerationPlan
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Generation, Incarnation, SlotId, Step, snapshot_id
from rackrun.worker.batch.share_changes import ShareChanges

Chain = tuple[tuple[int, int], ...]
"""(unit, generation whose gate it passed), ..."""


@dataclass
class Process:
    """One worker, as it is; the core only knows what it hears."""

    slot: SlotId
    incarnation: Incarnation
    rank: int | None
    generation: int
    state: str = "starting"  # starting, waiting, running, parked, resuming, dead
    stateful: bool = False
    chain: Chain = ()
    entered_in: int | None = None
    """Generation in which it entered the unit after its chain, whose gate it has not seen pass."""
    told: int = -1
    """The last unit that any plan told it is committed."""
    plan: GenerationPlan | None = None
    hung: str = ""  # "", "code" (parks, but never computes), "silent"
    reported: bool = False
    finished: bool = False
    resumed: Generation = Generation(0)
    told_to_pause: int = -1
    """The generation in which it was."""
    paused: bool = False
    torn: bool = False
    """It began to go back to its snapshot: until it resumes, its memory is neither the old state nor the new one."""
    sealed: tuple[int, int] = (0, -1)
    """Generation and id of its newest snapshot."""
    layout: int = 0
    """Of its state, and of the snapshots that it takes."""
    deals: ShareChanges = field(default_factory=ShareChanges)
    given: set[tuple[int, int]] = field(default_factory=lambda: {(0, -1)})
    """Of those of which its agent has sent stripes, with success or not."""
    up: deque[Event] = field(default_factory=deque)
    down: deque[Command] = field(default_factory=deque)

    @property
    def alive(self) -> bool:
        return self.state != "dead"

    @property
    def passed(self) -> int:
        return len(self.chain) - 1

    @property
    def rank_held(self) -> int:
        """The rank of a worker that has one."""
        assert self.rank is not None
        return self.rank

    @property
    def snapshot_now(self) -> int:
        """The id of the snapshot that it would take now."""
        return snapshot_id(Generation(self.layout), Step(self.passed))
