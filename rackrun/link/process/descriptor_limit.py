"""How many descriptors this process may open, and how many stay free for what must not fail: a recovery.

The kernel gives a new descriptor the lowest free number, so the number itself tells how many are open.
"""

from __future__ import annotations

import contextlib
import resource

__all__ = ["ceiling", "give_back", "raise_limit"]

Limit = tuple[int, int]
"""Soft and hard, as `resource.getrlimit` gives them."""
_WANTED = 1 << 20
_SHARE = 2
"""Of few descriptors, one in so many stays free."""


_before: Limit | None = None


def raise_limit() -> None:
    """Allow this process as many descriptors as an ordinary user may have."""
    global _before  # noqa: PLW0603 - a process has one limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _before = _before or (soft, hard)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back(pid: int) -> None:
    """A child that is started after `raise_limit` gets the limit that held before: scripts may call select()."""
    if _before is not None:
        with contextlib.suppress(ValueError, OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)


def ceiling(reserve: int) -> int:
    """The first number that a descriptor of a stranger must not have, so that ``reserve`` stay free (half of all, where that is less)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    return soft - min(reserve, soft // _SHARE)
