"""Whether a worker without progress works, or hangs: a pure judgement, from what was read of its process.

Who is compared with other ranks, because its own history says too little, has to show no sign of *life*: one wake a look, a trickle of data, a
thread that runs one hundredth of the time are enough. It may poll once a second for what only it waits for.

A process *works* while its processor time grows (its children's too), while it reads or writes, or while its main thread wakes again
and again (data that comes in, a poll). The time that a main thread takes which spins (`rackrun.worker.process.spin_loops`) is no sign of work. Time for which it could have run, and got no processor, is not its own: it is taken off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["HeldUp", "Patience", "Signs"]

_BUSY_SHARE = 0.05
_LIVES_SHARE, _LIVES_BYTES_PER_S = 0.01, 4096
_BYTES_PER_S, _WAKES_PER_S = 1 << 20, 5.0
_COMPUTES, _COMPUTES_SHARE = 30, 0.01
"""A thread that competes for processors waits at most so many times as long as it runs; one that only wakes waits hundreds of times as long."""


class Signs(NamedTuple):
    """What a process, and all below it, have done so far. Each only grows."""

    at_ns: int
    cpu_ns: int
    waits_ns: Mapping[int, tuple[int, int]]
    """By thread: how long it ran, and how long it was ready to run, without a processor."""
    io_bytes: int
    wakes: int
    """Of the main thread: how often it had slept by itself."""
    uninterruptible: bool = False
    """The main thread waits for a device right now."""
    main: int = 0
    """The main thread, among those of `waits_ns`."""
    others_ns: int = 0
    """As `cpu_ns`, without the main thread."""
    spins: tuple[int, int] = (0, 0)
    """Since when the main thread spins, and when that was seen last; 0: it does not."""


def _spun(before: Signs, now: Signs) -> bool:
    """The main thread, all the time in between."""
    since_ns, seen_ns = now.spins
    return 0 < since_ns <= before.at_ns < seen_ns


def starved_ns(before: Signs, now: Signs) -> int:
    """For so long some thread that computes waited for a processor. They may wait for each other: the longest wait counts. Threads that only
    wake and sleep again (for the interpreter's lock, for the time) do not."""
    longest, spun = 0, _spun(before, now)
    for thread, (ran, waited) in now.waits_ns.items():
        if spun and thread == now.main:
            continue  # it has no use for one
        ran_before, waited_before = before.waits_ns.get(thread, (ran, waited))
        least = max((waited - waited_before) / _COMPUTES, _COMPUTES_SHARE * (now.at_ns - before.at_ns))
        if ran - ran_before >= least:
            longest = max(longest, waited - waited_before)
    return longest


def works(before: Signs, now: Signs) -> bool:
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


def lives(before: Signs, now: Signs) -> bool:
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
class HeldUp:
    """For how long the agent itself did not run. Its workers may not have run either: that is not their time."""

    total_ns: int = 0
    _from_ns: int = 0
    _until_ns: int = 0
    """The last time without a look in between."""

    def add(self, from_ns: int, until_ns: int) -> None:
        if from_ns > self._until_ns:
            self._from_ns = from_ns
        self._until_ns = until_ns
        self.total_ns += until_ns - from_ns

    def by(self, at_ns: int) -> int:
        """How much of it was over at ``at_ns``, which is no earlier than the last time but one: progress that is seen only afterwards may
        have been made before."""
        return self.total_ns - max(self._until_ns - max(at_ns, self._from_ns), 0)


@dataclass(slots=True)
class Patience:
    """With one worker, since it last made progress, or since its stall was last told."""

    since_ns: int = -1
    """What its page said."""
    told: bool = False
    """That it stands still, or may; not that it goes on again."""
    prolonged: bool = False
    """It was told that it works for longer than it may be idle."""
    compared_ns: int = 0
    """When it was told that it is idle, or waits, though no limit is over; 0: it was not."""
    blocked_mark: int = 0
    """`HeartbeatPage.blocked_mark`, when it was told last that it waits."""
    _from_ns: int = 0
    _held_ns: int = 0
    """For so long the agent itself had been held up by then: what it sees after that, it sees late."""
    _signs: Signs | None = None
    _worked_ns: int = 0
    _lived_ns: int = 0
    _starved_ns: int = 0

    def progressed(self, since_ns: int, held_ns: int) -> None:
        """There was progress: everything counts from there."""
        self.since_ns, self._from_ns, self._held_ns = since_ns, since_ns, held_ns
        self.prolonged, self.compared_ns, self.blocked_mark = False, 0, 0
        self._forget()

    def tell(self, now_ns: int, held_ns: int) -> None:
        """Its stall is told: not again before the time is over once more."""
        self.told = True
        self._from_ns, self._held_ns = now_ns, held_ns
        self._forget()

    def _forget(self) -> None:
        self._signs, self._worked_ns, self._lived_ns, self._starved_ns = None, 0, 0, 0

    def look_again(self, now_ns: int, every_ns: int) -> bool:
        return self._signs is None or now_ns - self._signs.at_ns >= every_ns

    def saw(self, signs: Signs) -> None:
        before, self._signs = self._signs, signs
        if before is None:
            return
        self._starved_ns += min(starved_ns(before, signs), signs.at_ns - before.at_ns)
        if works(before, signs):
            self._worked_ns = signs.at_ns
        if lives(before, signs):
            self._lived_ns = signs.at_ns

    def quiet_ns(self, now_ns: int, held_ns: int) -> int:
        """Of its own: without progress, while it could run and was looked at."""
        return now_ns - self._from_ns - (held_ns - self._held_ns) - self._starved_ns

    def idle_ns(self, now_ns: int, held_ns: int) -> int:
        """Also without any other sign of life."""
        return min(now_ns - self._worked_ns, self.quiet_ns(now_ns, held_ns))

    def lifeless_ns(self, now_ns: int, held_ns: int) -> int:
        """Without any sign of life at all."""
        return min(now_ns - self._lived_ns, self.quiet_ns(now_ns, held_ns))

    def overdue(self, now_ns: int, held_ns: int, idle_limit_ns: int, busy_limit_ns: int) -> bool:
        """``busy_limit_ns`` 0: that it works is no excuse."""
        if not busy_limit_ns:
            return self.quiet_ns(now_ns, held_ns) > idle_limit_ns
        return self.idle_ns(now_ns, held_ns) > idle_limit_ns or self.quiet_ns(now_ns, held_ns) > busy_limit_ns
