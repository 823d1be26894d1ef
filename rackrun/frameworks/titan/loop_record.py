"""Where the Trainer's loop stands, as tracked state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["LoopRecord"]


class LoopRecord:
    """The loop's state at the last committed step; a tracked object, the same on all ranks."""

    def __init__(self) -> None:
        self.step = -1
        """rackrun's number of the last committed step; -1 before the first."""
        self.first = 0
        """How many steps the Trainer had done before rackrun's step 0, in a job that a checkpoint of torchtitan's began."""
        self.ntokens_seen = 0
        """The Trainer's count of tokens, of one rank."""
        self.loaders: list[Any] = []
        """The states of the loaders of all data shards in that checkpoint; empty without one."""

    def step_done(self, step: int, ntokens_seen: int) -> None:
        """Keep a step that has passed its gate."""
        self.step, self.ntokens_seen = step, ntokens_seen

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        loaders = json.dumps(self.loaders)
        return {"step": self.step, "first": self.first, "ntokens_seen": self.ntokens_seen, "loaders": loaders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set everything from a `state_dict`."""
        self.step, self.first = int(state["step"]), int(state["first"])
        self.ntokens_seen, self.loaders = int(state["ntokens_seen"]), json.loads(state["loaders"])
