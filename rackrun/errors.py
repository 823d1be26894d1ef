"""Errors that rackrun raises, grouped by cause: *yours*, *the hardware's*, *ours*.

::

    RackrunError
    +-- UsageError(ValueError)       yours: an argument, a script or a file that cannot work; exit code 2 before the start
    |   +-- StepError                yours: the script breaks a rule of steps and phases
    |   +-- DirectoryRefused         yours: the directory of checkpoints is full, another job's, or of another training
    +-- HardwareError                the hardware's: more than the job can survive; exit code 3
    |   +-- CollectiveBroken         a collective outside steps and phases lost a peer
    |   +-- StateLost                no verified copy of some shard is left
    +-- InternalError                ours: please report

Every message says what happened, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CollectiveBroken",
    "DirectoryRefused",
    "HardwareError",
    "InternalError",
    "InvalidTransition",
    "RackrunError",
    "StateLost",
    "StepError",
    "UsageError",
]


class RackrunError(Exception):
    """Base class of rackrun's errors. ``remedy`` says what the reader can do."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what} Remedy: {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class UsageError(RackrunError, ValueError):
    """An argument, a script or a file that cannot work."""


class StepError(UsageError):
    """The script breaks a rule of steps and phases."""


class DirectoryRefused(UsageError):
    """This job cannot use its directory of checkpoints: it is full, in use by another job, or of another training. The
    launcher says so in one line; the script's traceback would explain nothing."""


class HardwareError(RackrunError):
    """A hardware failure that the job cannot survive."""


class CollectiveBroken(HardwareError):
    """A collective outside steps and phases lost a peer. rackrun cannot repeat it for the script."""


class StateLost(HardwareError):
    """No verified copy of some shard is left."""


class InternalError(RackrunError):
    """rackrun's state contradicts itself: a bug in rackrun."""


class InvalidTransition(InternalError):
    """A state machine was given a trigger for which its state has no transition. ``story``: the transitions that led
    there."""

    def __init__(self, who: str, state: str, trigger: str, story: Iterable[str]) -> None:
        self.story = tuple(story)
        super().__init__(
            f"{who} is {state} and cannot {trigger} ({' > '.join(self.story)})",
            remedy="please report this, with the journal.",
        )
