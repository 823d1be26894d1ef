"""Decides which steps run extra checks. ``number`` counts the steps from 1, since the run began or was resumed."""

from __future__ import annotations

__all__ = ["is_audited", "is_looked_at"]

_AUDITED = 3
_LOOKED_AT = 16
_GOLDEN = 0x9E3779B9
"""2**32 times the golden ratio less 1. Its multiples are spread evenly modulo 2**32 (Knuth, The Art of Computer
Programming, 6.4), so the steps that are looked at also meet what a script does every so many steps."""


def is_audited(number: int) -> bool:
    """Whether step ``number`` compares state by content digests: the first three steps do, and then those whose number
    is a power of two."""
    return number <= _AUDITED or not number & (number - 1)


def is_looked_at(number: int) -> bool:
    """Whether step ``number`` runs every check that costs host time only: the first 16 steps do, then one in eight on
    average, and at least one of any thirteen in a row."""
    return number <= _LOOKED_AT or is_audited(number) or number * _GOLDEN % 2**32 < 2**29
