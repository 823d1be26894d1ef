"""What interrupts the main thread: a unit that will not count, an outdated plan, a world for which ``main`` begins
again."""

from __future__ import annotations

__all__ = ["Abandoned", "LoopDrained", "Reenter", "Superseded"]


class Abandoned(BaseException):
    """The current unit will not count: leave it, discard its changes, recover. Never raised inside autograd."""


class Superseded(Exception):
    """A newer generation was announced while this one was being joined."""


class Reenter(BaseException):
    """The world will have other ranks, for which the script must build everything anew: leave ``main``, and enter it
    again."""


class LoopDrained(SystemExit):
    """The job ends at this step boundary, and the script's loop has no other way to learn it: leave ``main``. A script
    without a ``main`` ends by it, with exit code 0."""
