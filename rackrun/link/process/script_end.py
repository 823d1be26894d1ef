"""What has to be done when the user's script has ended without an error: a run that the script has opened waits for the
other ranks then."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["at_script_end", "script_ended"]

_functions: list[Callable[[], None]] = []


def at_script_end(function: Callable[[], None]) -> None:
    """Call ``function()`` when the script has ended without an error, the newest first."""
    _functions.append(function)


def script_ended() -> None:
    """Call the functions that were given to `at_script_end`, each once. Errors propagate."""
    while _functions:
        _functions.pop()()
