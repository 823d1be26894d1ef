"""Crash points: named places in the code at which a test stops the process; no-ops unless a handler is enabled.

The handler raises, exits or sends SIGKILL, at the n-th point passed or at a named one. Modules register their names at
import, so a test can visit each of `CRASH_POINTS` and show that none was missed. ``make crashes`` covers all of them
but those of export.

Read `CRASH_POINTS` as an attribute of the module: registering replaces the tuple.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CRASH_POINTS", "crash_point", "enable", "register"]

CRASH_POINTS: tuple[str, ...] = ()

_handler: Callable[[str], None] | None = None


def register(*names: str) -> None:
    """Register ``names``. Each name belongs to one place in the code, so registering a name twice is an error."""
    global CRASH_POINTS  # noqa: PLW0603 - a registry filled at import
    twice = set(names) & set(CRASH_POINTS)
    assert not twice, f"registered twice: {sorted(twice)}"
    CRASH_POINTS += names


def enable(handler: Callable[[str], None] | None) -> None:
    """Call ``handler`` with the name of every crash point that the process passes; None disables it."""
    global _handler  # noqa: PLW0603 - one per process, for tests
    _handler = handler


def crash_point(name: str) -> None:
    """Pass the crash point ``name``: call the enabled handler, if there is one."""
    if _handler is not None:
        assert name in CRASH_POINTS, f"{name} is not registered"
        _handler(name)
