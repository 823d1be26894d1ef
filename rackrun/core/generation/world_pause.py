"""The pause of all ranks after the same step, and the transitions of its table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rackrun.core.members.transitions import STORY_MAX, next_state
from rackrun.protocol.ids import Rank

__all__ = ["PAUSE_TRANSITIONS", "PauseState", "PauseTrigger", "WorldPause"]


class PauseState(StrEnum):
    """How far all ranks have paused; `PAUSE_TRANSITIONS` says what leads from one to the next."""

    NONE = "none"
    PAUSING = "pausing"
    PAUSED = "paused"
    OVERDUE = "overdue"


class PauseTrigger(StrEnum):
    """What moves a pause from one state to the next."""

    BEGIN = "begin"
    COMPLETE = "complete"
    EXPIRE = "expire"
    END = "end"


PAUSE_TRANSITIONS: Mapping[PauseState, Mapping[PauseTrigger, PauseState]] = {
    PauseState.NONE: {PauseTrigger.BEGIN: PauseState.PAUSING},
    PauseState.PAUSING: {
        PauseTrigger.COMPLETE: PauseState.PAUSED,
        PauseTrigger.EXPIRE: PauseState.OVERDUE,
        PauseTrigger.END: PauseState.NONE,
    },
    PauseState.PAUSED: {PauseTrigger.END: PauseState.NONE},
    PauseState.OVERDUE: {PauseTrigger.END: PauseState.NONE},
}
"""The transition table. `docs/state_machines.md` draws it."""


@dataclass(slots=True)
class WorldPause:
    """The pause of a generation. The world ends it when the training phase ends, for whatever reason."""

    state: PauseState = PauseState.NONE
    ranks: dict[Rank, None] = field(default_factory=dict)
    """The ranks that have paused."""
    _story: deque[str] = field(default_factory=lambda: deque([PauseState.NONE.value], STORY_MAX))

    def move(self, trigger: PauseTrigger) -> None:
        """Make one transition of the table. Raises `InvalidTransition`, and changes nothing, if there is none."""
        self.state = next_state("the pause", self.state, trigger, PAUSE_TRANSITIONS, self._story)
        if self.state is PauseState.NONE:
            self.ranks.clear()
