"""Named streams of random numbers, all from one seed: a fault more in a plan does not move those of the others.

A stream is a function of the seed and its name alone, so that any process can draw from it without asking another.
"""

from __future__ import annotations

import hashlib
import random

__all__ = ["stream"]


def stream(seed: int, *name: str | int) -> random.Random:
    """The stream called ``name``."""
    text = "/".join(str(part) for part in (seed, *name))
    return random.Random(hashlib.blake2b(text.encode(), digest_size=16).digest())
