"""Print messages for the user on stderr."""

from __future__ import annotations

import sys

__all__ = ["SaveWarnings", "say"]


def say(what: str) -> None:
    """Print a message for the user to stderr."""
    print(f"rackrun: {what}", file=sys.stderr, flush=True)


class SaveWarnings:
    """Prints what went wrong with a save once for each reason, because a full disk stays full."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def say(self, rank: int, what: str, reason: str = "") -> None:
        """Print ``what`` unless its reason was printed before. ``reason``: by default what follows the colon."""
        reason = reason or what.partition(": ")[2] or what
        if reason not in self._reasons:
            self._reasons.add(reason)
            say(f"rank {rank}: {what}; training goes on")
