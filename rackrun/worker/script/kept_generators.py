"""Generators of the script around the loader that go on from step to step. What they keep cannot be put back."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rackrun.errors import StepError
from rackrun.worker.script.user_line import generators
from rackrun.worker.steps.step import Step

__all__ = ["KeptGenerators"]

_SEEN_IN = 4
"""In how many iterations over loaders it is looked for generators that an earlier step has begun."""


@dataclass(frozen=True)
class _Use:
    """The first and the latest attempt in which an iteration over a loader began within a generator."""

    first: Step
    latest: Step


class KeptGenerators:
    """The generators that were among the calls when iterations over loaders began, in this attempt and in those before
    that they may have been left in."""

    def __init__(self) -> None:
        self._iterations = 0
        self._attempt: Step | None = None
        self._uses: dict[types.FrameType, _Use] = {}

    def begin(self, attempt: Step, function: Callable[..., Any], *, newcomer: bool) -> list[str]:
        """Note that an iteration begins in ``attempt``. Return the variables of generators from an earlier step; [] after
        the first iterations, as they have been found by then.

        ``function``: the step function. ``newcomer``: whether this process has taken a rank over in this entry of main.
        Raises `StepError` if a generator keeps what an attempt has left that does not count, or what it has on a
        newcomer is not what it has on the other ranks.
        """
        if attempt is not self._attempt:
            self._forget(attempt)
        around = generators()
        uses = {frame: use for frame in around if (use := self._uses.get(frame)) is not None}
        self._uses |= {frame: _Use(uses[frame].first if frame in uses else attempt, attempt) for frame in around}
        earlier = [frame for frame, use in uses.items() if use.first is not attempt]
        if newcomer:
            held = [frame for frame in around if frame in _held_by(function)]
            _refuse_newcomer(_kept(earlier) or _kept(held, bound_only=False))
        _refuse(_kept([frame for frame, use in uses.items() if _is_repeated(use.latest, attempt)]))
        self._iterations += 1
        return _kept(earlier) if self._iterations <= _SEEN_IN else []

    def check_left(self) -> None:
        """Check the generators that go on now, in an iteration that began in an attempt that does not count. Raises
        `StepError` if they keep values and were there when it began."""
        _refuse(_kept([frame for frame in generators() if frame in self._uses]))

    def _forget(self, attempt: Step) -> None:
        """Forget, as ``attempt`` begins, the generators that were not used in the attempt before, except those that an
        attempt has left that does not count."""
        before, self._attempt = self._attempt, attempt
        self._uses = {
            frame: use
            for frame, use in self._uses.items()
            if use.latest is before or (use.latest._discarded and use.latest._at.step + 1 >= attempt._at.step)
        }


def _is_repeated(latest: Step, attempt: Step) -> bool:
    """Return whether what was computed in ``latest`` does not count in ``attempt``."""
    return latest is not attempt and (latest._discarded or attempt._at <= latest._at)


def _refuse(kept: Sequence[str]) -> None:
    if kept:
        raise StepError(
            f"a generator around run.loader, kept from step to step, holds {', '.join(kept)}. A step that is done again "
            "would begin with what the attempt that does not count has left there.",
            remedy="call the generator function in the @run.step function.",
        )


def _refuse_newcomer(kept: Sequence[str]) -> None:
    if kept:
        raise StepError(
            f"a generator around run.loader, kept from step to step, holds {', '.join(kept)}. This process has taken a rank "
            "over, and has begun the generator anew, with other values than those of the rank that is gone.",
            remedy="call the generator function in the @run.step function.",
        )


def _held_by(function: Callable[..., Any]) -> set[types.FrameType | None]:
    """Return the frames of the generators that ``function`` has from outside, by the name of a variable."""
    return {one.gi_frame for one in _outer_values(function) if isinstance(one, types.GeneratorType)}


def _outer_values(function: Callable[..., Any]) -> Iterator[object]:
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _kept(frames: Sequence[types.FrameType], *, bound_only: bool = True) -> list[str]:
    """Return the names of variables that these generators keep from one micro-batch to the next. One variable of a
    generator does not count: it is the micro-batch. ``bound_only``: leave out variables without a value; before the
    first micro-batch, its variable has none."""
    names = list[str]()
    for frame in frames:
        code, bound = frame.f_code, frame.f_locals
        own = [*code.co_varnames[code.co_argcount + code.co_kwonlyargcount :], *code.co_cellvars]
        if len(own := [name for name in own if name in bound or not bound_only]) > 1:
            names += own
    return names
