"""What the process of a sink says to the coordinator, as lines of JSON."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = ["FINISH", "Closed", "Delivered", "Failed", "Note", "Opened", "Said"]

FINISH = b"finish"
"""The line after which no other comes."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The target is open."""


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """Everything up to the item ``seq`` is where it belongs, but ``refused`` records that can never be there."""

    seq: int
    refused: int = 0
    why: str = ""


class Note(msgspec.Struct, frozen=True, tag=True):
    """A text for people."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process ends, because the target does not take values."""

    why: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """All is delivered, and the target is closed."""


Said: TypeAlias = Opened | Delivered | Note | Failed | Closed
