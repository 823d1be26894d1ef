"""Generators of the script around the loader that go on from step to step. What they keep cannot be put back."""

from __future__ import annotations

import types
from collections.abc import Sequence

from rackrun.worker.script.user_line import generators

__all__ = ["KeptGenerators"]

_SEEN_IN = 4
"""In how many iterations over loaders it is looked for generators that an earlier step has begun."""


class KeptGenerators:
    """The generators that were among the calls when the latest iteration over a loader began."""

    def __init__(self) -> None:
        self._iterations = 0
        self._around: dict[types.FrameType, int] = {}
        """Each generator, with the step in which it was first seen."""

    def begin(self, step: int) -> list[str]:
        """Note that an iteration begins in ``step``. Return the variables of generators from an earlier step; [] after
        the first iterations, as they have been found by then."""
        around = generators()
        self._around = {frame: self._around.get(frame, step) for frame in around}
        self._iterations += 1
        if self._iterations > _SEEN_IN:
            return []
        return _kept([frame for frame in around if self._around[frame] != step])

    def left(self) -> list[str]:
        """Return the variables of generators that were there when the iteration began, and go on now."""
        return _kept([frame for frame in generators() if frame in self._around])


def _kept(frames: Sequence[types.FrameType]) -> list[str]:
    """Return the names of variables that these generators keep from one micro-batch to the next. One variable of a
    generator does not count: it is the micro-batch."""
    names = list[str]()
    for frame in frames:
        code, bound = frame.f_code, frame.f_locals
        own = [*code.co_varnames[code.co_argcount + code.co_kwonlyargcount :], *code.co_cellvars]
        if len(own := [name for name in own if name in bound]) > 1:
            names += own
    return names
