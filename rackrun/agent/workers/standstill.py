"""Whether the agent itself stood still between two looks at its workers, and whether they stood still with it.

A host that is suspended, migrated or stalled by its hypervisor, and processes that are frozen or stopped, have one thing
in common: the agent's main thread wakes late, though it neither ran nor waited for a processor. `CLOCK_BOOTTIME` is
used, because `CLOCK_MONOTONIC` does not advance while a host is suspended. An agent that waits in a call into the kernel
(a file system that does not answer) cannot be told apart from that. But its workers tick on their heartbeat pages
several times a second: if they went on doing so, only the agent stood still.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

__all__ = ["BOUND_NS", "UsageReading", "read_moment", "stood_still_ns", "workers_ran"]

BOUND_NS = 1_000_000_000
"""Shortest standstill that is reported, in nanoseconds."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
_TICK_NS = 250_000_000
"""Longest time between two ticks of a worker that runs, in nanoseconds. An elastic script's ticks more often."""
_AT_THE_EDGES = 3
"""Ticks that a worker may make right before and after the agent stood still, if it stood still with it."""

K = TypeVar("K")


class UsageReading(NamedTuple):
    """What the agent has used so far, and when. Every value only grows."""

    at_ns: int
    """Time since the host started, including the time in which it was suspended."""
    ran_ns: int
    """Processor time of all threads of the agent: one may hold the interpreter's lock that the main thread waits
    for."""
    waited_ns: int
    """How long the main thread was ready to run but had no processor; 0: the kernel does not count it."""


def read_moment() -> UsageReading:
    """Return the present moment. Called by the main thread."""
    try:
        with open(_SCHEDSTAT, encoding="ascii") as file:
            waited_ns = int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        waited_ns = 0
    return UsageReading(time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.process_time_ns(), waited_ns)


def stood_still_ns(before: UsageReading, now: UsageReading, asleep_ns: int) -> int:
    """Return for how long the agent stood still between two moments, in nanoseconds; 0: for less than `BOUND_NS`.

    ``asleep_ns``: how long it meant to sleep between them.
    """
    used_ns = now.ran_ns - before.ran_ns + max(now.waited_ns - before.waited_ns, 0)  # less, if it could not be read
    stood_ns = now.at_ns - before.at_ns - asleep_ns - used_ns
    return stood_ns if stood_ns >= BOUND_NS else 0


def workers_ran(before: Mapping[K, int], now: Mapping[K, int], stood_ns: int) -> bool | None:
    """Return whether workers ran while the agent stood still for ``stood_ns`` nanoseconds; None: that is not known.

    ``before``, ``now``: for each worker, its count of ticks at the agent's last look and at the present one. They have
    all stood still only if the one with the most ticks has.
    """
    most = max((now[worker] - ticks for worker, ticks in before.items() if worker in now), default=None)
    if most is None:
        return None
    if most <= _AT_THE_EDGES:
        return False
    return True if most >= max(stood_ns / _TICK_NS / 2, 2 * _AT_THE_EDGES) else None
