"""What each rank has computed in a step, brought to all of them: its numbers, and the attributes of the script's own.

Both travel with the step's gate where they are short enough, and else in a collective of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rackrun.frameworks.rank_texts import (
    MARK,
    NoRoomError,
    mark,
    numbers_of_text,
    room_for_text,
    texts_of_numbers,
    texts_of_ranks,
)
from rackrun.frameworks.script_attributes import ScriptAttributes
from rackrun.worker.loop.run import Run
from rackrun.worker.steps.step import Step

__all__ = ["RankResults"]

_FIRST_STEPS = 3
"""Steps of a process in which it learns by how much the attributes grow: they are gathered before the gate there."""
_GATE_VALUES_MAX = 4096
"""The most numbers, of all ranks together, that travel with the gate. More have a collective of their own."""


class RankResults:
    """One for all steps. `room_wanted`, `offer` and `take` are called once in each attempt at a step, in this order."""

    def __init__(self, run: Run, own: ScriptAttributes) -> None:
        self._run, self._own = run, own
        self._steps, self._entered, self._growth = 0, 0, 0
        """Attempts so far; bytes of the attributes at the beginning of this one; the most that they grew in one."""
        self._longest = 0
        """Bytes of the longest attributes for which there was no room."""
        self._room = 0
        self._left = ""
        self._early: list[tuple[float, ...]] | None = None
        self._early_texts: list[str] = []

    def room_wanted(self, entered: str) -> float:
        """Return how many bytes the attributes may have in this step: inf where that is not known yet, 0 where there are
        none. ``entered``: those that it begins with."""
        self._entered, self._steps = len(entered.encode()), self._steps + 1
        if not self._own.may_change:
            return 0.0
        known = self._steps > _FIRST_STEPS
        return max(1.0, self._entered + 2.0 * self._growth, self._longest) if known else math.inf

    def offer(self, step: Step, values: Sequence[float], wanted: float) -> None:
        """Offer ``values``, as many as all ranks offer, and what the script's attributes are now, before
        ``optimizer.step()``. ``wanted``: the most `room_wanted` of all ranks."""
        self._left, self._early, run = self._own.changed() if self._own.may_change else "", None, self._run
        self._growth = max(self._growth, len(self._left.encode()) - self._entered)
        self._room = room_for_text(wanted) if 0 < wanted < math.inf else 0
        if wanted < math.inf and run.world_size * (len(values) + self._room) <= _GATE_VALUES_MAX:
            text = numbers_of_text(self._left, self._room) if self._room else []
            step._gather_with_gate([*values, *text], self._has_no_room if self._room else None)
            return
        rows = self._gather([*values, *mark(self._left)])
        self._early = [row[:-MARK] for row in rows]
        self._early_texts = texts_of_ranks(run, self._left, [row[-MARK:] for row in rows])

    def take(self, step: Step) -> tuple[list[tuple[float, ...]], list[str]]:
        """Return the values of each rank, and the attributes of each rank, or once if all are alike. To be called after
        ``optimizer.step()``."""
        if self._early is not None:
            return self._early, self._early_texts
        rows = step._gathered
        if not self._room:
            return rows, [self._left]
        values = [row[: -self._room] for row in rows]
        try:
            return values, self._texts(rows)
        except NoRoomError:  # the gate, which is still to come in a step of several parts, refuses this attempt
            return values, [self._left]

    def _has_no_room(self, rows: list[tuple[float, ...]]) -> bool:
        """Whether a rank's attributes have grown by more than twice what they did before. The step is done again, with
        more room: no rank can tell the others before the gate without one more collective in each step."""
        try:
            self._texts(rows)
        except NoRoomError as error:
            self._longest = max(self._longest, error.longest)
            return True
        return False

    def _texts(self, rows: list[tuple[float, ...]]) -> list[str]:
        return texts_of_numbers([row[-self._room :] for row in rows], self._left)

    def _gather(self, mine: list[float]) -> list[tuple[float, ...]]:
        """Return this list of every rank. Collective."""
        if self._run.world_size == 1:
            return [tuple(mine)]
        row = torch.tensor(mine, dtype=torch.float64, device=self._run.device)
        rows = [torch.empty_like(row) for _ in range(self._run.world_size)]
        dist.all_gather(rows, row)
        return [tuple(one.tolist()) for one in rows]
