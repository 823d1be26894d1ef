"""Whether a worker without progress works or hangs: a pure judgement from readings of its process.

A worker that is compared with other ranks, because its own history says too little, must show no sign of *life*. One
wake in a look, a trickle of data, or a thread that runs one hundredth of the time is enough of a sign, because it may
poll once a second for something that only it waits for.

A process *works* while its processor time grows (or its children's), while it reads or writes, or while its main thread
wakes repeatedly (for incoming data, or to poll). Time in which a main thread spins
(`rackrun.worker.process.spin_loops`) is no sign of work. Time in which a thread was ready to run but had no processor
does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AgentPauses", "ProgressTimer", "ActivityTotals"]

_BUSY_SHARE = 0.05
_LIVES_SHARE, _LIVES_BYTES_PER_S = 0.01, 4096
_BYTES_PER_S, _WAKES_PER_S = 1 << 20, 5.0
_COMPUTES, _COMPUTES_SHARE = 30, 0.01
"""A thread that competes for processors waits at most `_COMPUTES` times as long as it runs; a thread that only wakes
waits hundreds of times as long. It also runs for at least the share `_COMPUTES_SHARE` of the time between two
readings."""


class ActivityTotals(NamedTuple):
    """What a process and all its descendants have done so far. Every value only grows."""

    at_ns: int
    cpu_ns: int
    waits_ns: Mapping[int, tuple[int, int]]
    """For each thread: how long it ran, and how long it was ready to run but had no processor."""
    io_bytes: int
    wakes: int
    """How often the main thread woke after it had gone to sleep by itself."""
    uninterruptible: bool = False
    """Whether the main thread is waiting for a device right now."""
    main: int = 0
    """Thread id of the main thread, as in `waits_ns`."""
    others_ns: int = 0
    """As `cpu_ns`, without the main thread."""
    spins: tuple[int, int] = (0, 0)
    """Since when the main thread spins, and when that was last seen; 0: it does not."""


def _spun(before: ActivityTotals, now: ActivityTotals) -> bool:
    """Return whether the main thread spun during the whole interval."""
    since_ns, seen_ns = now.spins
    return 0 < since_ns <= before.at_ns < seen_ns


def starved_ns(before: ActivityTotals, now: ActivityTotals) -> int:
    """Return how long a computing thread waited for a processor.

    Threads may wait for each other, so the longest wait counts. Threads that only wake and sleep again (for the
    interpreter's lock, or for time to pass) do not count.
    """
    longest, spun = 0, _spun(before, now)
    for thread, (ran, waited) in now.waits_ns.items():
        if spun and thread == now.main:
            continue  # a spinning thread needs no processor
        ran_before, waited_before = before.waits_ns.get(thread, (ran, waited))
        least = max((waited - waited_before) / _COMPUTES, _COMPUTES_SHARE * (now.at_ns - before.at_ns))
        if ran - ran_before >= least:
            longest = max(longest, waited - waited_before)
    return longest


def works(before: ActivityTotals, now: ActivityTotals) -> bool:
    """Return whether the process worked between two readings."""
    took_ns = max(now.at_ns - before.at_ns, 1)
    spun = _spun(before, now)
    computed_ns = now.others_ns - before.others_ns if spun else now.cpu_ns - before.cpu_ns
    return (
        computed_ns >= _BUSY_SHARE * took_ns
        or starved_ns(before, now) >= _BUSY_SHARE * took_ns
        or now.io_bytes - before.io_bytes >= _BYTES_PER_S * took_ns / 1e9
        or (not spun and now.wakes - before.wakes >= max(_WAKES_PER_S * took_ns / 1e9, 2))
        or (before.uninterruptible and now.uninterruptible)
    )


def lives(before: ActivityTotals, now: ActivityTotals) -> bool:
    """Return whether the process showed any sign of life between two readings."""
    took_ns, spun = max(now.at_ns - before.at_ns, 1), _spun(before, now)
    ran_ns = [
        ran - before.waits_ns.get(thread, (0, 0))[0]
        for thread, (ran, _) in now.waits_ns.items()
        if not (spun and thread == now.main)
    ]
    return (
        works(before, now)
        or max(ran_ns, default=0) >= _LIVES_SHARE * took_ns
        or now.io_bytes - before.io_bytes >= _LIVES_BYTES_PER_S * took_ns / 1e9
        or (not spun and now.wakes > before.wakes)
    )


@dataclass(slots=True)
class AgentPauses:
    """How long the agent itself did not run. Its workers may not have run either, so this time does not count for
    them."""

    total_ns: int = 0
    _from_ns: int = 0
    _until_ns: int = 0
    """Begin and end of the latest interval without a look."""

    def add(self, from_ns: int, until_ns: int) -> None:
        """Add an interval in which the agent did not look, on the monotonic clock in ns."""
        if from_ns > self._until_ns:
            self._from_ns = from_ns
        self._until_ns = until_ns
        self.total_ns += until_ns - from_ns

    def by(self, at_ns: int) -> int:
        """Return how much of that time was over at ``at_ns``, which is no earlier than the last but one interval.
        Progress that is seen only after an interval may have been made before it."""
        return self.total_ns - max(self._until_ns - max(at_ns, self._from_ns), 0)


@dataclass(slots=True)
class ProgressTimer:
    """How long one worker has been without progress, since its last progress or its last report."""

    since_ns: int = -1
    """Time of the last progress on the worker's page."""
    reported: bool = False
    """Whether it was reported that the worker stands still or may; reset when its progress is reported."""
    repeats: int = 0
    """How often the stall was reported since the last progress."""
    prolonged: bool = False
    """Whether it was reported that the worker works for longer than it may be idle."""
    compared_ns: int = 0
    """When it was reported that the worker is idle, or waits, although no limit is over; 0: it was not."""
    blocked_mark: int = 0
    """`HeartbeatPage.blocked_mark` at the latest report that the worker waits."""
    _from_ns: int = 0
    _held_ns: int = 0
    """How long the agent had been held up by then. It sees later events late."""
    _signs: ActivityTotals | None = None
    _worked_ns: int = 0
    _lived_ns: int = 0
    _starved_ns: int = 0

    def restart(self, since_ns: int, held_ns: int) -> None:
        """Record progress: all times count from there."""
        self.since_ns, self._from_ns, self._held_ns = since_ns, since_ns, held_ns
        self.prolonged, self.compared_ns, self.blocked_mark, self.repeats = False, 0, 0, 0
        self._reset()

    def mark_reported(self, now_ns: int, held_ns: int) -> None:
        """Record that the stall was reported. It is not reported again before the whole time has passed once more."""
        self.reported = True
        self.repeats += 1
        self._from_ns, self._held_ns = now_ns, held_ns
        self._reset()

    def _reset(self) -> None:
        self._signs, self._worked_ns, self._lived_ns, self._starved_ns = None, 0, 0, 0

    def is_due(self, now_ns: int, every_ns: int) -> bool:
        """Return whether the last reading is at least ``every_ns`` old."""
        return self._signs is None or now_ns - self._signs.at_ns >= every_ns

    def add_reading(self, signs: ActivityTotals) -> None:
        """Add a reading of the process, and count what has changed since the one before."""
        before, self._signs = self._signs, signs
        if before is None:
            return
        self._starved_ns += min(starved_ns(before, signs), signs.at_ns - before.at_ns)
        if works(before, signs):
            self._worked_ns = signs.at_ns
        if lives(before, signs):
            self._lived_ns = signs.at_ns

    def quiet_ns(self, now_ns: int, held_ns: int) -> int:
        """Return the time without progress, without time in which the worker could not run or was not looked at."""
        return now_ns - self._from_ns - (held_ns - self._held_ns) - self._starved_ns

    def idle_ns(self, now_ns: int, held_ns: int) -> int:
        """Return the time without progress in which the worker did not work either."""
        return min(now_ns - self._worked_ns, self.quiet_ns(now_ns, held_ns))

    def lifeless_ns(self, now_ns: int, held_ns: int) -> int:
        """Return the time without progress and without any sign of life."""
        return min(now_ns - self._lived_ns, self.quiet_ns(now_ns, held_ns))

    def overdue(self, now_ns: int, held_ns: int, idle_limit_ns: int, busy_limit_ns: int) -> bool:
        """Return whether a limit is exceeded. ``busy_limit_ns`` 0: working does not extend the limit."""
        if not busy_limit_ns:
            return self.quiet_ns(now_ns, held_ns) > idle_limit_ns
        return self.idle_ns(now_ns, held_ns) > idle_limit_ns or self.quiet_ns(now_ns, held_ns) > busy_limit_ns
