"""How long a process may stand still before it is given up, and shorter times to stand still."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["SHORT_S", "SHORT_TRAY_S", "is_short", "shorter"]

SHORT_S = 0.7
"""A worker that stands still for this many seconds is not given up: rackrun begins to look after one second."""
SHORT_TRAY_S = 10.0
"""A tray or coordinator that stands still for this many seconds is not given up: the lease is 15 s."""
_FOR_S_MIN = 0.25
_FOR_S_FIRST = 4.0


def is_short(for_s: float | None, *, on_workers: bool) -> bool:
    """Whether nobody is given up who stands still for ``for_s`` seconds; None: until the plan heals."""
    return for_s is not None and for_s <= (SHORT_S if on_workers else SHORT_TRAY_S)


def shorter(for_s: float | None) -> Iterator[float]:
    """Yield half the time, down to a quarter of a second; four seconds where there is no time yet."""
    if for_s is None:
        yield _FOR_S_FIRST
    elif for_s / 2 >= _FOR_S_MIN:
        yield round(for_s / 2, 3)
