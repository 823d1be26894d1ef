"""Named streams of random numbers from one seed, so that a fault added to a plan does not change the others' numbers.

A stream depends on the seed and its name alone, so any process can draw from it without asking another.
"""

from __future__ import annotations

import hashlib
import random

__all__ = ["stream"]


def stream(seed: int, *name: str | int) -> random.Random:
    """Return the stream that the seed and ``name`` determine."""
    text = "/".join(str(part) for part in (seed, *name))
    return random.Random(hashlib.blake2b(text.encode(), digest_size=16).digest())
