"""Errors of `rackrun.checkpoint`: a branch of `rackrun.errors`, by who can remedy them.

::

    RackrunError
    +-- CheckpointError              a checkpoint operation cannot be done
        +-- IntegrityError           the hardware's: bytes are not those that were sealed, or a file was replaced
        |   +-- Unreadable           storage does not give the bytes: they may be right, and readable later
        |   +-- NotOurs              what has a checkpoint's name is no checkpoint of that number
        +-- NoUsableCheckpoint       the hardware's, a StateLost: no verified copy of what was asked for
        +-- LayoutMismatch           yours: saved and wanted tensors do not fit
        +-- MemoryPlanError          yours: the request exceeds the available memory or disk space
        +-- FormatVersionError       yours: another release, or another kind of machine, wrote a format not read here
        +-- DuplicateOwner           two living processes claim one thing under one fencing token
        +-- StaleFencingToken        a newer fencing token has taken over: the caller is fenced
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.checkpoint.base.deprecation import warn_renamed
from rackrun.errors import HardwareError, RackrunError, StateLost, UsageError

__all__ = [
    "CheckpointError",
    "DuplicateOwner",
    "FormatVersionError",
    "IntegrityError",
    "LayoutMismatch",
    "MemoryPlanError",
    "NoUsableCheckpoint",
    "NotOurs",
    "StaleFencingToken",
    "Unreadable",
    "is_damage",
]


class CheckpointError(RackrunError):
    """A checkpoint operation cannot be done."""


class IntegrityError(CheckpointError, HardwareError):
    """Bytes are not those that were sealed, or a file is not the one that was opened. Another copy may be whole."""


class Unreadable(IntegrityError):
    """Storage does not give the bytes. They may be right."""


class NotOurs(IntegrityError):
    """What has a checkpoint's name is no checkpoint of that number, such as a copy that somebody made."""


def is_damage(error: CheckpointError) -> bool:
    """Whether bytes are wrong or missing for good.

    False when storage did not give them, another release wrote them, or they were never those of this checkpoint.
    """
    return isinstance(error, IntegrityError) and not isinstance(error, Unreadable | NotOurs)


class NoUsableCheckpoint(CheckpointError, StateLost):
    """There is no verified copy of what was asked for."""


class LayoutMismatch(CheckpointError, UsageError):
    """Saved and wanted tensors do not fit each other."""


class MemoryPlanError(CheckpointError, UsageError):
    """The request exceeds the available memory or disk space."""


class FormatVersionError(CheckpointError, UsageError):
    """The data was written by a release, or for a machine, whose format this one does not read."""


class DuplicateOwner(CheckpointError):
    """Two living processes claim one thing under one fencing token."""


class StaleFencingToken(CheckpointError):
    """A writer with a newer fencing token has taken over. The caller is fenced and writes no more."""


if not TYPE_CHECKING:  # for a type checker there is no other name than those above

    def __getattr__(name: str) -> object:
        if name == "NoUsableGeneration":
            warn_renamed("NoUsableGeneration", "NoUsableCheckpoint")
            return NoUsableCheckpoint
        if name == "StaleEpoch":
            warn_renamed("StaleEpoch", "StaleFencingToken")
            return StaleFencingToken
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
