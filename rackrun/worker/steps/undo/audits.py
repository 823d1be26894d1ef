"""Decides which steps run extra checks. ``number`` counts the steps from 1, since the run began or was resumed."""

from __future__ import annotations

__all__ = ["is_audited", "is_looked_at", "spread"]

_AUDITED = 3
_LOOKED_AT = 16
_GOLDEN = 0x9E3779B9
"""2**32 times the golden ratio less 1."""


def spread(number: int) -> int:
    """Return a number below 2**32 for each step. They are spread evenly, also for every tenth step or any other such
    choice (Knuth, The Art of Computer Programming, 6.4), so checks meet what a script does every so many steps."""
    return number * _GOLDEN % 2**32


def is_audited(number: int) -> bool:
    """Whether step ``number`` compares state by content digests: the first three steps do, and then those whose number
    is a power of two."""
    return number <= _AUDITED or not number & (number - 1)


def is_looked_at(number: int) -> bool:
    """Whether step ``number`` runs every check that costs host time only: the first 16 steps do, then one in eight on
    average, and at least one of any thirteen in a row."""
    return number <= _LOOKED_AT or is_audited(number) or spread(number) < 2**29
