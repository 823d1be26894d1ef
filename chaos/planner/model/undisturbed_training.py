"""Compute the steps, the newest snapshot and the newest checkpoint of a stretch of undisturbed training, without
events."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TrainingTimes", "TrainingProgress", "progress"]


class TrainingTimes(NamedTuple):
    """The times of training, in seconds; ``step_s`` is what a step takes in the present world."""

    step_s: float
    snapshot_every: int
    """Steps between two snapshots; 0: none are taken."""
    snapshot_s: float
    copy_s: float
    checkpoint_every: int
    checkpoint_s: float
    write_s: float

    def time(self, since: int, steps: int) -> float:
        """Return the time from the end of step ``since`` until ``steps`` more are done, with the saves that are due."""
        end = since + steps
        found = steps * self.step_s
        if self.snapshot_every:
            found += (end // self.snapshot_every - since // self.snapshot_every) * self.snapshot_s
        if self.checkpoint_every:
            found += (end // self.checkpoint_every - since // self.checkpoint_every) * self.checkpoint_s
        return found

    def committed(self, since: int, steps: int) -> float:
        """Return the time until the last of them is done, before it is saved."""
        return 0.0 if not steps else self.time(since, steps - 1) + self.step_s


class TrainingProgress(NamedTuple):
    """The result of a stretch of training."""

    steps: int
    saving_s: float
    rest_s: float
    """Seconds of a step or a save that did not end."""
    snapshot: int
    """The steps after which the newest snapshot that is sealed and copied was taken."""
    checkpoint: int


def progress(pace: TrainingTimes, since: int, seconds: float, snapshot: int, checkpoint: int) -> TrainingProgress:
    """Return what ``seconds`` of training achieve.

    ``since``: steps done before; ``snapshot``, ``checkpoint``: the newest before.
    """
    low, high = 0, int(seconds / pace.step_s) + 1
    while low < high:  # the most steps whose last one is committed in time
        middle = (low + high + 1) // 2
        if pace.committed(since, middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    saving_s = min(pace.time(since, low), seconds) - low * pace.step_s
    return TrainingProgress(
        steps=low,
        saving_s=saving_s,
        rest_s=seconds - low * pace.step_s - saving_s,
        snapshot=_newest(pace, since, low, seconds - pace.copy_s, pace.snapshot_every, snapshot),
        checkpoint=_newest(pace, since, low, seconds - pace.write_s, pace.checkpoint_every, checkpoint),
    )


def _newest(pace: TrainingTimes, since: int, steps: int, by_s: float, every: int, before: int) -> int:
    if not every:
        return before
    at = (since + steps) // every * every
    while at > since and pace.time(since, at - since) > by_s:
        at -= every
    return max(at, before) if at > since else before
