"""Heartbeat page: shared memory in which a worker shows its progress without a system call, and which outlives it.

The agent creates the page (a memfd, so nothing can be left in ``/dev/shm``) and passes it to the worker at the fork.
Every field is one aligned 64-bit word with a single writer, so a read is never torn. The ledger slots hold more than a
word and are sealed by writing their position last. Times are ``time.monotonic_ns()``: one clock on one host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np

from rackrun.protocol.events import CollectiveWait
from rackrun.protocol.ids import BEGIN, Generation, Position

__all__ = ["LEDGER_IDS_MAX", "PAGE_BYTES", "Activity", "HeartbeatPage"]

LEDGER_IDS_MAX = 65_536
"""Largest number of sample ids that one rank can record for one unit. If there are more, only a count and a digest are
kept."""

_WORDS = 512
_SLOT_WORDS = 8 + LEDGER_IDS_MAX
PAGE_BYTES = 8 * (_WORDS + 2 * _SLOT_WORDS)  # sparse: only touched pages take memory

_TICK, _ACTIVITY, _SINCE, _STEP, _PHASE, _ENTERED, _COMPLETED, _GENERATION, _DEADLINE_MS, _SNAPSHOT_0, _SNAPSHOT_1 = (
    range(11)
)
_MIRROR_WANTED, _MIRROR_KEEP, _MIRROR_DONE, _MIRROR_GENERATION = range(11, 15)
_BUSY_MS, _PLACE_ASKED, _PLACE_TOLD, _EARLY = range(15, 19)
_TO_END = 19
_LEAST_MS, _OWN_SINCE, _SPINS_SINCE, _SPINS_SEEN, _PLAIN_TICK = range(20, 25)
_BY_DEVICE, _UNREACHED, _UNPASSED = range(25, 28)
_TICKS, _PLAIN_TICKS = 28, 29
_UNIT_TEXT, _PLACE_TEXT = 32, 64  # a length in bytes, then UTF-8; of the first, up to the second
_LIFELINE, _LIFELINE_HELD = 256, 272  # a pthread mutex (see `rackrun.link.robust_mutex`), and whether it is held yet
_BLOCKED = 280  # a mark, then generation, group and number, how many groups follow, and two words for each
_BLOCKED_GROUPS = _BLOCKED + 5
_SEALED_STEP, _SEALED_PHASE, _COUNT, _SEALED_IN = range(4)


class Activity(IntEnum):
    """What the main thread is doing."""

    SETUP = 0
    WAITING = 1  # a spare at run.steps(), or a finished rank
    STEP = 2
    PHASE = 3
    RECOVERING = 4
    BETWEEN = 5  # the user's own code between two units, and after the last
    EXITING = 6  # released: all work is done


class HeartbeatPage:
    """A view of one page. The worker writes through it and the agent reads, also after the worker has died."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = np.frombuffer(self._map, dtype=np.int64)

    @staticmethod
    def create(name: str) -> int:
        """Create a page and return its descriptor, which children inherit only if it is passed on."""
        fd = os.memfd_create(f"rackrun-page-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return fd

    # -- written by the agent
    def end(self) -> None:
        """Tell the worker that it is to end, so that it knows that the following SIGTERM is the agent's."""
        self._words[_TO_END] = 1

    @property
    def to_end(self) -> bool:
        """Whether the agent has told the worker to end (`end`)."""
        return bool(self._words[_TO_END])

    # -- written in a worker that has no control thread (yet)
    def tick_plain(self) -> bool:
        """Show that the process is alive before its control thread runs. Return whether this is still needed."""
        self._words[_PLAIN_TICK] = time.monotonic_ns()
        self._words[_PLAIN_TICKS] += 1
        return not self._words[_TICK]

    @property
    def plain_tick_ns(self) -> int:
        """When `tick_plain` was last called, on the monotonic clock in ns; 0: never."""
        return int(self._words[_PLAIN_TICK])

    # -- written by the worker's control thread
    def tick(self) -> None:
        """Show that the control thread runs."""
        self._words[_TICK] = time.monotonic_ns()
        self._words[_TICKS] += 1

    # -- written by the worker's main thread
    def enter(
        self, activity: Activity, at: Position = BEGIN, deadline_ms: int = 0, busy_ms: int = 0, least_ms: int = 0
    ) -> None:
        """Begin an activity. Limits are in milliseconds.

        ``deadline_ms`` > 0 enables hang detection: no progress for longer is a stall. ``busy_ms`` > 0 is allowed
        instead while the process is seen to work. ``least_ms`` > 0: after being idle for this long, the rank is
        compared with other ranks.
        """
        words = self._words
        words[_DEADLINE_MS] = 0  # disarm while the rest changes
        words[_STEP], words[_PHASE] = at.step, at.phase
        words[_ACTIVITY] = activity
        words[_SINCE] = time.monotonic_ns()
        words[_BUSY_MS], words[_LEAST_MS] = busy_ms, least_ms
        words[_DEADLINE_MS] = deadline_ms

    @contextlib.contextmanager
    def no_deadline(self) -> Iterator[None]:
        """Context in which nothing counts as a stall, because this rank does not control how long it waits. Afterwards
        the activity has its full time again."""
        words = self._words
        deadline_ms = int(words[_DEADLINE_MS])
        words[_DEADLINE_MS] = 0
        try:
            yield
        finally:
            words[_SINCE] = time.monotonic_ns()
            words[_DEADLINE_MS] = deadline_ms

    def allow(self, at_least_ms: int) -> None:
        """Raise all limits of the present activity to at least ``at_least_ms``, counted from now."""
        words = self._words
        for word in (_BUSY_MS, _LEAST_MS):
            words[word] = max(int(words[word]), at_least_ms) if words[word] else 0
        words[_DEADLINE_MS] = max(int(words[_DEADLINE_MS]), at_least_ms)
        words[_SINCE] = time.monotonic_ns()

    @contextlib.contextmanager
    def with_limit_at_least(self, at_least_ms: int) -> Iterator[None]:
        """Context in which all limits of the present activity are at least ``at_least_ms``, where there are any.
        Afterwards the activity has its former limits, counted from then."""
        words = self._words
        before = {word: int(words[word]) for word in (_DEADLINE_MS, _BUSY_MS, _LEAST_MS)}
        if before[_DEADLINE_MS]:
            self.allow(at_least_ms)
        try:
            yield
        finally:
            words[_SINCE] = time.monotonic_ns()
            for word, limit in before.items():
                words[word] = limit

    def name_unit(self, name: str) -> None:
        """Set the name, for people, of a phase that begins now."""
        self._write_text(_UNIT_TEXT, name, _PLACE_TEXT)

    def progress(self) -> None:
        """Record progress of the main thread, such as a collective or a batch. This restarts the deadline."""
        self._words[_SINCE] = time.monotonic_ns()

    def collective_entered(self) -> None:
        """Record that the host has called a collective."""
        self._words[_ENTERED] += 1
        self._words[_SINCE] = time.monotonic_ns()

    def collective_completed(self) -> None:
        """Record that a collective has completed; the rank's own code begins again now."""
        self._words[_COMPLETED] += 1
        self._words[_SINCE] = self._words[_OWN_SINCE] = time.monotonic_ns()

    def collectives_over(self) -> None:
        """Record that all entered collectives have completed on the device too."""
        self._words[_COMPLETED] = self._words[_ENTERED]
        self._words[_SINCE] = self._words[_OWN_SINCE] = time.monotonic_ns()

    def tell_blocked(self, generation: int, group: int, number: int, called: Sequence[tuple[int, int]]) -> None:
        """Record in which collective the main thread is blocked, as in `CollectiveWait`. Nothing is recorded if there
        are more groups than the page can hold."""
        words = self._words
        if len(called) > (_WORDS - _BLOCKED_GROUPS) // 2:
            return
        words[_BLOCKED] = 0
        words[_BLOCKED + 1 : _BLOCKED_GROUPS] = generation, group, number, len(called)
        for index, pair in enumerate(called):
            words[_BLOCKED_GROUPS + 2 * index : _BLOCKED_GROUPS + 2 * index + 2] = pair
        words[_BLOCKED] = time.monotonic_ns()

    def tell_not_blocked(self) -> None:
        self._words[_BLOCKED] = 0

    @property
    def called(self) -> int:
        """How many collectives the host has called in this generation."""
        return int(self._words[_ENTERED])

    def by_device(self) -> None:
        """Let `device_at` define this rank's progress from now on, because its host runs ahead of the device."""
        self._words[_BY_DEVICE] = 1

    def new_generation(self, generation: int) -> None:
        """Begin a generation: reset the counts of collectives."""
        self._words[_ENTERED] = self._words[_COMPLETED] = 0
        self._words[_GENERATION] = generation
        self._words[_OWN_SINCE] = time.monotonic_ns()

    @property
    def own_ms_now(self) -> int:
        """Return the milliseconds since the last collective completed, or since the generation began."""
        return (time.monotonic_ns() - int(self._words[_OWN_SINCE])) // 1_000_000

    def seal_ledger(self, at: Position, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Record the sample ids (int64) that the loader delivered for ``at``, before its gate is entered. The last two
        steps' units are kept."""
        slot = self._ledger_slot(at)
        kept = ids[:LEDGER_IDS_MAX]
        slot[_SEALED_STEP] = -2  # torn until the position is written again
        slot[_COUNT] = len(ids)
        slot[8 : 8 + len(kept)] = kept
        slot[_SEALED_PHASE], slot[_SEALED_IN] = at.phase, self._words[_GENERATION]
        slot[_SEALED_STEP] = at.step

    def seal_snapshot(self, index: int, step: int) -> None:
        """Record that snapshot slot ``index`` (0 or 1) holds ``step``, complete; -1 while it is being written."""
        self._words[_SNAPSHOT_0 + index] = step + 1

    def want_mirror(self, step: int, keep: int, generation: int) -> None:
        """Ask the agent to give other trays a copy, or parity, of the sealed snapshot of ``step``.

        They also keep that of ``keep`` (-1: none). ``generation`` is the one in which all ranks took it.
        """
        self._words[_MIRROR_KEEP] = keep + 1
        self._words[_MIRROR_GENERATION] = generation
        self._words[_MIRROR_WANTED] = step + 1

    @property
    def mirroring(self) -> bool:
        """Whether the latest request has neither succeeded nor failed yet."""
        return int(self._words[_MIRROR_WANTED]) != abs(int(self._words[_MIRROR_DONE]))

    @property
    def mirrored(self) -> int:
        """The step of the latest request if other trays have it now; else -1."""
        done = int(self._words[_MIRROR_DONE])
        return done - 1 if done == int(self._words[_MIRROR_WANTED]) else -1

    @property
    def mirror_failed(self) -> int:
        """The step of the latest request if it could not be given to another tray; else -1."""
        done = int(self._words[_MIRROR_DONE])
        return -done - 1 if done < 0 and -done == int(self._words[_MIRROR_WANTED]) else -1

    # -- written when the script has ended
    def failed_early(self) -> None:
        """Record that the worker failed before it could communicate with another rank."""
        self._words[_EARLY] = 1

    @property
    def early(self) -> bool:
        """Whether the worker failed before it could communicate with another rank (`failed_early`)."""
        return bool(self._words[_EARLY])

    # -- where the main thread is: asked by the agent, told by the control thread
    def ask_place(self) -> None:
        """Ask the worker where its main thread is."""
        self._words[_PLACE_ASKED] += 1

    @property
    def place_asked(self) -> bool:
        """Whether the place was asked for and has not been reported yet."""
        return bool(self._words[_PLACE_ASKED] != self._words[_PLACE_TOLD])

    def tell_place(self, place: str) -> None:
        """Report where the main thread is."""
        asked = int(self._words[_PLACE_ASKED])
        self._write_text(_PLACE_TEXT, place, _LIFELINE)
        self._words[_PLACE_TOLD] = asked

    def device_at(self, unreached: int, unpassed: int) -> None:
        """Record the device's position among the collectives that the host has called, numbered from 1.

        ``unreached`` is the first collective that the device has not reached, because it computes what precedes it.
        ``unpassed`` is the first that it has not passed. 0: there is none. The control thread writes this, and so does
        the main thread when all are known to be over.
        """
        self._words[_UNREACHED], self._words[_UNPASSED] = unreached, unpassed

    def tell_spins(self, since_ns: int, seen_ns: int) -> None:
        """Record since when the main thread spins (`rackrun.worker.process.spin_loops`), as seen at ``seen_ns``; 0: it
        does not."""
        self._words[_SPINS_SINCE], self._words[_SPINS_SEEN] = since_ns, seen_ns

    @property
    def spins(self) -> tuple[int, int]:
        """The two times of `tell_spins`."""
        return int(self._words[_SPINS_SINCE]), int(self._words[_SPINS_SEEN])

    @property
    def place(self) -> str:
        """The place that was last reported; "": none."""
        return self._read_text(_PLACE_TEXT, _LIFELINE)

    @property
    def unit_name(self) -> str:
        """The name of the present unit, as last written; "": it has none."""
        return self._read_text(_UNIT_TEXT, _PLACE_TEXT)

    def _write_text(self, at: int, text: str, end: int) -> None:
        data = text.encode(errors="replace")[: 8 * (end - at - 1)]
        self._words[at] = 0
        start = 8 * (at + 1)
        self._map[start : start + len(data)] = data
        self._words[at] = len(data)

    def _read_text(self, at: int, end: int) -> str:
        start, length = 8 * (at + 1), min(max(int(self._words[at]), 0), 8 * (end - at - 1))
        return self._map[start : start + length].decode(errors="ignore")

    # -- written by the agent
    def mirror_done(self, step: int, *, well: bool) -> None:
        """Record that the request for ``step`` succeeded or failed."""
        self._words[_MIRROR_DONE] = (step + 1) * (1 if well else -1)

    # -- read by the agent
    @property
    def mirror_wanted(self) -> tuple[int, int, int]:
        """The wanted step, the step to keep besides it, and the generation in which it was taken."""
        wanted, keep, generation = (int(self._words[i]) for i in (_MIRROR_WANTED, _MIRROR_KEEP, _MIRROR_GENERATION))
        return wanted - 1, keep - 1, generation

    @property
    def tick_ns(self) -> int:
        """When the control thread last ran, on the monotonic clock in ns; 0: never."""
        return int(self._words[_TICK])

    @property
    def ticks(self) -> int:
        """How many times the worker has shown that it runs; it does so several times a second."""
        return int(self._words[_TICKS] + self._words[_PLAIN_TICKS])

    @property
    def activity(self) -> Activity:
        return Activity(int(self._words[_ACTIVITY]))

    @property
    def since_ns(self) -> int:
        """When the main thread entered its present activity, on the monotonic clock in ns; 0: it has entered none."""
        return int(self._words[_SINCE])

    @property
    def at(self) -> Position:
        return Position(int(self._words[_STEP]), int(self._words[_PHASE]))

    @property
    def collectives(self) -> tuple[int, int]:
        """How many collectives were entered and completed in this generation; on the device, if there is one."""
        entered, completed = int(self._words[_ENTERED]), int(self._words[_COMPLETED])
        if not self._words[_BY_DEVICE]:
            return entered, completed
        unreached, unpassed = int(self._words[_UNREACHED]), int(self._words[_UNPASSED])
        if unreached:
            entered = unreached - 1
        return entered, entered - 1 if 0 < unpassed <= entered else entered

    @property
    def blocked_mark(self) -> int:
        """A number that differs for each `tell_blocked`; 0: the main thread is not known to be blocked."""
        return int(self._words[_BLOCKED])

    @property
    def blocked(self) -> CollectiveWait | None:
        """Return the collective in which the main thread is blocked, as last recorded; None: not known."""
        mark = self.blocked_mark
        generation, group, number, count = map(int, self._words[_BLOCKED + 1 : _BLOCKED_GROUPS])
        pairs = self._words[_BLOCKED_GROUPS : _BLOCKED_GROUPS + 2 * count].reshape(-1, 2).tolist()
        if not mark or mark != self.blocked_mark:
            return None
        called = tuple((int(known_by), int(calls)) for known_by, calls in pairs)
        return CollectiveWait(generation=Generation(generation), group=group, number=number, called=called)

    @property
    def generation(self) -> int:
        return int(self._words[_GENERATION])

    @property
    def deadline_ms(self) -> int:
        return int(self._words[_DEADLINE_MS])

    @property
    def busy_ms(self) -> int:
        return int(self._words[_BUSY_MS])

    @property
    def least_ms(self) -> int:
        """As in `enter`."""
        return int(self._words[_LEAST_MS])

    @property
    def own_ms(self) -> int:
        """For a rank that waits in a collective: milliseconds that its own code took before it entered."""
        return max(int(self._words[_SINCE]) - int(self._words[_OWN_SINCE]), 0) // 1_000_000

    def ledger(self, at: Position) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """Return the ids that were delivered for ``at``, as int64; None if they are not, or no longer, complete
        here."""
        slot = self._ledger_slot(at)
        if (int(slot[_SEALED_STEP]), int(slot[_SEALED_PHASE])) != (at.step, at.phase) or int(
            slot[_COUNT]
        ) > LEDGER_IDS_MAX:
            return None
        return slot[8 : 8 + int(slot[_COUNT])].copy()

    def ledger_generation(self, at: Position) -> int:
        """Return the generation in which the ids for ``at`` were delivered, perhaps to another rank than now."""
        return int(self._ledger_slot(at)[_SEALED_IN])

    def snapshots(self) -> dict[int, int]:
        """Return the slot that holds each sealed snapshot, by its step."""
        found = {int(self._words[_SNAPSHOT_0 + index]) - 1: index for index in (0, 1)}
        found.pop(-1, None)
        return found

    def _ledger_slot(self, at: Position) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = _WORDS + _SLOT_WORDS * (at.step % 2)
        return self._words[start : start + _SLOT_WORDS]

    # -- used by `rackrun.link.robust_mutex`
    @property
    def lifeline_address(self) -> int:
        """The address, in this process, of the mutex that shows whether the worker lives."""
        return int(self._words.ctypes.data) + 8 * _LIFELINE

    @property
    def lifeline_held(self) -> bool:
        """Whether the worker has locked its lifeline."""
        return bool(self._words[_LIFELINE_HELD])

    @lifeline_held.setter
    def lifeline_held(self, held: bool) -> None:
        self._words[_LIFELINE_HELD] = held

    def close(self) -> None:
        """Unmap the page. No other method may be called afterwards."""
        del self._words
        self._map.close()
