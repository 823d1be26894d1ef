"""Whether the agent itself stood still between two looks at its workers, and whether they stood still with it.

A host that is suspended, migrated or stalled by its hypervisor, and processes that are frozen or stopped, have one thing
in common: the agent's main thread wakes late, though it neither ran nor waited for a processor. `CLOCK_BOOTTIME` is
used, because `CLOCK_MONOTONIC` does not advance while a host is suspended. An agent that waits in a call into the kernel
(a file system that does not answer) cannot be told apart from that. But its workers tick on their heartbeat pages
several times a second: if they went on doing so, only the agent stood still. A worker does not tick while native code
holds the interpreter's lock, but its main thread uses a processor then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

__all__ = ["BOUND_NS", "UsageReading", "main_thread_ns", "read_moment", "stood_still_ns", "workers_ran"]

BOUND_NS = 1_000_000_000
"""Shortest standstill that is reported, in nanoseconds."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
_TICK_NS = 250_000_000
"""Longest time between two ticks of a worker that runs, in nanoseconds. An elastic script's ticks more often."""
_AT_THE_EDGES = 3
"""Ticks that a worker may make right before and after the agent stood still, if it stood still with it."""

_BEFORE_NS = 250_000_000
"""Longest time that a worker's main thread may have run right before and after the agent stood still, in nanoseconds."""

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


def main_thread_ns(pid: int) -> int:
    """Return how long the main thread of a process has run so far, in nanoseconds; 0: that cannot be read."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError, ValueError):
        return 0


def workers_ran(before: Mapping[K, tuple[int, int]], now: Mapping[K, tuple[int, int]], stood_ns: int) -> bool | None:
    """Return whether workers ran while the agent stood still for ``stood_ns`` nanoseconds; None: that is not known.

    ``before``, ``now``: for each worker, its count of ticks and its `main_thread_ns` at the agent's last look and at the
    present one. They have all stood still only if the one with the most ticks has, and no main thread has run. A time
    that could be read at one of the looks only says nothing.
    """
    both = [(now[worker], then) for worker, then in before.items() if worker in now]
    if not both:
        return None
    ticks = max(at[0] - then[0] for at, then in both)
    ran_ns = max(at[1] - then[1] if at[1] and then[1] else 0 for at, then in both)
    if ticks >= max(stood_ns / _TICK_NS / 2, 2 * _AT_THE_EDGES) or ran_ns >= stood_ns / 2 + _BEFORE_NS:
        return True
    return False if ticks <= _AT_THE_EDGES and ran_ns <= stood_ns / 10 + _BEFORE_NS else None
