"""Errors of `rackrun.checkpoint`, a branch of `rackrun.errors`, by whose they are.

::

    RackrunError
    +-- CheckpointError              a checkpoint operation cannot be done
        +-- IntegrityError           the hardware's: bytes are not what was sealed, or a file is not the one it was
        |   +-- Unreadable           storage does not give the bytes: they may be right, and come another time
        +-- NoUsableGeneration       the hardware's, a StateLost: no verified copy of what was asked for
        +-- LayoutMismatch           yours: saved and wanted tensors do not fit
        +-- MemoryPlanError          yours: it does not fit into the memory or the disk there is
        +-- FormatVersionError       yours: written by a release, or for a machine, that this one does not read
        +-- DuplicateOwner           two living processes claim one thing in one epoch
        +-- StaleEpoch               a newer epoch has taken over: the caller is fenced
"""

from __future__ import annotations

from rackrun.errors import HardwareError, RackrunError, StateLost, UsageError

__all__ = [
    "CheckpointError",
    "DuplicateOwner",
    "FormatVersionError",
    "IntegrityError",
    "LayoutMismatch",
    "MemoryPlanError",
    "NoUsableGeneration",
    "StaleEpoch",
    "Unreadable",
    "is_damage",
]


class CheckpointError(RackrunError):
    """A checkpoint operation cannot be done."""


class IntegrityError(CheckpointError, HardwareError):
    """Bytes are not what was sealed, or a file is not the one that was opened. Another copy may be whole."""


class Unreadable(IntegrityError):
    """Storage does not give the bytes. Nothing is known against them."""


def is_damage(error: CheckpointError) -> bool:
    """Bytes are wrong or missing, and stay so. False: storage did not give them, or another release wrote them."""
    return isinstance(error, IntegrityError) and not isinstance(error, Unreadable)


class NoUsableGeneration(CheckpointError, StateLost):
    """No verified copy of what was asked for."""


class LayoutMismatch(CheckpointError, UsageError):
    """Saved and wanted tensors do not fit."""


class MemoryPlanError(CheckpointError, UsageError):
    """It does not fit into the memory or the disk there is."""


class FormatVersionError(CheckpointError, UsageError):
    """Written by a release, or for a machine, that this one does not read."""


class DuplicateOwner(CheckpointError):
    """Two living processes claim one thing in one epoch."""


class StaleEpoch(CheckpointError):
    """A newer epoch has taken over. The caller is fenced and writes no more."""
