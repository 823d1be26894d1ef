"""What a stretch of undisturbed training comes to: steps, and the newest snapshot and checkpoint. Arithmetic: no event for each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Pace", "Progress", "progress"]


class Pace(NamedTuple):
    """Seconds, while ``step_s`` is what a step takes in the world as it is."""

    step_s: float
    snapshot_every: int
    """Steps; 0: none are taken."""
    snapshot_s: float
    copy_s: float
    checkpoint_every: int
    checkpoint_s: float
    write_s: float

    def time(self, since: int, steps: int) -> float:
        """From the end of step ``since`` until ``steps`` more are done, and saved where they are to be."""
        end = since + steps
        found = steps * self.step_s
        if self.snapshot_every:
            found += (end // self.snapshot_every - since // self.snapshot_every) * self.snapshot_s
        if self.checkpoint_every:
            found += (end // self.checkpoint_every - since // self.checkpoint_every) * self.checkpoint_s
        return found

    def committed(self, since: int, steps: int) -> float:
        """Until the last of them is done, before it is saved."""
        return 0.0 if not steps else self.time(since, steps - 1) + self.step_s


class Progress(NamedTuple):
    steps: int
    saving_s: float
    rest_s: float
    """Of a step that was begun, or of saving that did not end."""
    snapshot: int
    """The newest that is sealed and copied: after so many steps."""
    checkpoint: int


def progress(pace: Pace, since: int, seconds: float, snapshot: int, checkpoint: int) -> Progress:
    """``since``: steps done before; ``snapshot``, ``checkpoint``: the newest before."""
    low, high = 0, int(seconds / pace.step_s) + 1
    while low < high:  # the most whose last is committed in time
        middle = (low + high + 1) // 2
        if pace.committed(since, middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    saving_s = min(pace.time(since, low), seconds) - low * pace.step_s
    return Progress(
        steps=low,
        saving_s=saving_s,
        rest_s=seconds - low * pace.step_s - saving_s,
        snapshot=_newest(pace, since, low, seconds - pace.copy_s, pace.snapshot_every, snapshot),
        checkpoint=_newest(pace, since, low, seconds - pace.write_s, pace.checkpoint_every, checkpoint),
    )


def _newest(pace: Pace, since: int, steps: int, by_s: float, every: int, before: int) -> int:
    if not every:
        return before
    at = (since + steps) // every * every
    while at > since and pace.time(since, at - since) > by_s:
        at -= every
    return max(at, before) if at > since else before
