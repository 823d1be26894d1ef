"""Where the script is in its loop: which position its next phase has, and what calls return that are committed
already.

A *turn* is one pass through the loop's body. A process that takes a rank over may enter a turn whose step is committed,
because the others are in a phase that the body calls after it. It makes the same calls as they made, and those that are
committed return at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rackrun.errors import StepError
from rackrun.protocol.ids import EVERY, NEXT_TURN, Position
from rackrun.worker.state.state_manifest import TurnResults

__all__ = ["Turn", "decoded", "encoded", "with_phase", "with_step"]

_PHASES_MAX = EVERY - 1


class Turn:
    """The place of the script in its loop."""

    def __init__(self) -> None:
        self._from = Position(-1, NEXT_TURN)
        self._phases = 0

    def begins(self, step: int) -> None:
        """Note that a turn begins whose body has yet to call step ``step``."""
        self._from, self._phases = Position(step - 1, NEXT_TURN), 0

    def after_step(self, step: int) -> None:
        """Note that the body has called step ``step``; -1: none yet, in a loop that has no turns before steps."""
        self._from, self._phases = Position(step, 0), 0

    @property
    def place(self) -> Position:
        """The position of the last phase that the body has called, or else of its last step."""
        return Position(self._from.step, self._from.phase + self._phases)

    def next_phase(self) -> Position:
        """Return the position of the phase that the body calls now. Raises `StepError` for too many."""
        if self._phases == _PHASES_MAX:
            raise StepError(
                f"run.phase was called more than {_PHASES_MAX} times between two steps.",
                remedy="do more in one phase.",
            )
        self._phases += 1
        return Position(self._from.step, self._from.phase + self._phases)


def encoded(result: Any) -> bytes:
    """Return ``result`` as msgpack, or b"" if it does not consist of numbers, texts, lists and dictionaries. A tuple
    becomes a list."""
    try:
        return msgspec.msgpack.encode(result)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""


def decoded(result: bytes) -> Any:
    """Return what `encoded` was given; None where it could not encode that."""
    return msgspec.msgpack.decode(result, strict=False) if result else None


def with_step(result: Any) -> TurnResults:
    """Return the results of a turn whose step function has returned ``result``."""
    return TurnResults(step=encoded(result))


def with_phase(results: TurnResults, phase: int, result: Any) -> TurnResults:
    """Return the results of a turn in which the phase number ``phase`` has returned ``result``."""
    return TurnResults(step=results.step, last_phase=phase, of_last_phase=encoded(result))
