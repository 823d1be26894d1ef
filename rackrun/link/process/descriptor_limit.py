"""Limit of open descriptors, and how many are kept free for a recovery, which must not fail.

The kernel gives a new descriptor the lowest free number, so the number itself shows how many are open.
"""

from __future__ import annotations

import contextlib
import resource

__all__ = ["ceiling", "give_back", "raise_limit"]

Limit = tuple[int, int]
"""Soft and hard limit, as `resource.getrlimit` returns them."""
_WANTED = 1 << 20
_SHARE = 2
"""If there are few descriptors, one in this many is kept free."""


_before: Limit | None = None


def raise_limit() -> None:
    """Raise the limit as far as an ordinary user may."""
    global _before  # noqa: PLW0603 - a process has one limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _before = _before or (soft, hard)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back(pid: int) -> None:
    """Give a child process the limit that held before `raise_limit`, because scripts may call select()."""
    if _before is not None:
        with contextlib.suppress(ValueError, OSError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)


def ceiling(reserve: int) -> int:
    """Return the first number that a stranger's descriptor must not have, so that ``reserve`` descriptors stay free, or
    half of all if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    return soft - min(reserve, soft // _SHARE)
