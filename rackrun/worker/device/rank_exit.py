"""A rank that ends itself."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["leave"]


def leave(rank: int, because: str) -> None:
    """What this process has is of no use to the world: end it, so that the world goes on from another copy."""
    print(f"rackrun: rank {rank} {because}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
