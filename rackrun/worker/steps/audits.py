"""Which steps cost more than others, because more is looked at. ``number``: of a step, from 1, since the run began or was resumed."""

from __future__ import annotations

__all__ = ["is_audited", "is_looked_at"]

_AUDITED = 3
_LOOKED_AT = 16
_GOLDEN = 0x9E3779B9
"""2**32 times the golden ratio less 1. Its multiples are spread evenly (Knuth, The Art of Computer Programming, 6.4): what a script does every so many
steps meets the steps that are looked at, too."""


def is_audited(number: int) -> bool:
    """Content is compared, by digests: in the first three steps, and then in ever fewer."""
    return number <= _AUDITED or not number & (number - 1)


def is_looked_at(number: int) -> bool:
    """Everything is asked that costs the host's time alone: in the first 16 steps, and then in one of eight, at least one of thirteen."""
    return number <= _LOOKED_AT or is_audited(number) or number * _GOLDEN % 2**32 < 2**29
