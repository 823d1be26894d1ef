"""The heartbeat page: how a worker shows its progress without a system call, and what outlives it when it dies.

The agent makes the page (a memfd, so there is nothing in ``/dev/shm`` to leave behind) and hands it to the worker at the
fork. Every field is one aligned 64-bit word with a single writer, so a read is never torn; the ledger slots, which hold
more than a word, are sealed by writing their position last. Times are ``time.monotonic_ns()``, one clock on one host.
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
"""Sample ids that one rank can record for one unit; more are kept as a count and a digest only."""

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
_UNIT_TEXT, _PLACE_TEXT = 32, 64  # a length in bytes, then UTF-8; of the first, up to the second
_LIFELINE, _LIFELINE_HELD = 256, 272  # a pthread mutex (see `rackrun.link.robust_mutex`), and whether it is held yet
_BLOCKED = 280  # a mark, then generation, group and number, how many groups follow, and two words for each
_BLOCKED_GROUPS = _BLOCKED + 5
_SEALED_STEP, _SEALED_PHASE, _COUNT, _SEALED_IN = range(4)


class Activity(IntEnum):
    """What the main thread is in."""

    SETUP = 0
    WAITING = 1  # a spare at run.steps(), or a finished rank
    STEP = 2
    PHASE = 3
    RECOVERING = 4
    BETWEEN = 5  # the user's own code between two units, and after the last
    EXITING = 6  # released: everything is done


class HeartbeatPage:
    """A view of one page. The worker writes through it; the agent, and after a death only the agent, reads."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._words = np.frombuffer(self._map, dtype=np.int64)

    @staticmethod
    def create(name: str) -> int:
        """A new page, as a file descriptor that children inherit only where it is passed on."""
        fd = os.memfd_create(f"rackrun-page-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return fd

    # -- written by the agent
    def end(self) -> None:
        """The worker is to end: the SIGTERM that follows is the agent's."""
        self._words[_TO_END] = 1

    @property
    def to_end(self) -> bool:
        return bool(self._words[_TO_END])

    # -- written in a worker that has no control thread (yet)
    def tick_plain(self) -> bool:
        """Whether this is still needed: not once the control thread ticks."""
        self._words[_PLAIN_TICK] = time.monotonic_ns()
        return not self._words[_TICK]

    @property
    def plain_tick_ns(self) -> int:
        return int(self._words[_PLAIN_TICK])

    # -- written by the worker's control thread
    def tick(self) -> None:
        self._words[_TICK] = time.monotonic_ns()

    # -- written by the worker's main thread
    def enter(
        self, activity: Activity, at: Position = BEGIN, deadline_ms: int = 0, busy_ms: int = 0, least_ms: int = 0
    ) -> None:
        """Begin an activity. ``deadline_ms`` > 0 arms hang detection: no progress for longer is a stall. ``busy_ms`` > 0: as long as
        the process is seen to work, that much is allowed instead. ``least_ms`` > 0: idle for so long, it is compared with other ranks."""
        words = self._words
        words[_DEADLINE_MS] = 0  # disarm while the rest changes
        words[_STEP], words[_PHASE] = at.step, at.phase
        words[_ACTIVITY] = activity
        words[_SINCE] = time.monotonic_ns()
        words[_BUSY_MS], words[_LEAST_MS] = busy_ms, least_ms
        words[_DEADLINE_MS] = deadline_ms

    @contextlib.contextmanager
    def no_deadline(self) -> Iterator[None]:
        """Within it nothing is a stall: this rank does not answer for how long it waits. After it the activity has all its time again."""
        words = self._words
        deadline_ms = int(words[_DEADLINE_MS])
        words[_DEADLINE_MS] = 0
        try:
            yield
        finally:
            words[_SINCE] = time.monotonic_ns()
            words[_DEADLINE_MS] = deadline_ms

    def allow(self, at_least_ms: int) -> None:
        """From now on, for the activity that has begun."""
        words = self._words
        for word in (_BUSY_MS, _LEAST_MS):
            words[word] = max(int(words[word]), at_least_ms) if words[word] else 0
        words[_DEADLINE_MS] = max(int(words[_DEADLINE_MS]), at_least_ms)
        words[_SINCE] = time.monotonic_ns()

    def name_unit(self, name: str) -> None:
        """What people call a phase that begins now."""
        self._write_text(_UNIT_TEXT, name, _PLACE_TEXT)

    def progress(self) -> None:
        """The main thread is alive and on its way: a collective, a batch. Restarts the deadline."""
        self._words[_SINCE] = time.monotonic_ns()

    def collective_entered(self) -> None:
        self._words[_ENTERED] += 1
        self._words[_SINCE] = time.monotonic_ns()

    def collective_completed(self) -> None:
        """What follows is this rank's own code again, which begins now."""
        self._words[_COMPLETED] += 1
        self._words[_SINCE] = self._words[_OWN_SINCE] = time.monotonic_ns()

    def collectives_over(self) -> None:
        """All that were entered have completed on the device too."""
        self._words[_COMPLETED] = self._words[_ENTERED]
        self._words[_SINCE] = self._words[_OWN_SINCE] = time.monotonic_ns()

    def tell_blocked(self, generation: int, group: int, number: int, called: Sequence[tuple[int, int]]) -> None:
        """As `CollectiveWait` says. Nothing is told of more groups than the page has room for."""
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
        """How many collectives the host has called for in this generation."""
        return int(self._words[_ENTERED])

    def by_device(self) -> None:
        """From now on `device_at` says how far this rank has come: its host is ahead of that."""
        self._words[_BY_DEVICE] = 1

    def new_generation(self, generation: int) -> None:
        self._words[_ENTERED] = self._words[_COMPLETED] = 0
        self._words[_GENERATION] = generation
        self._words[_OWN_SINCE] = time.monotonic_ns()

    @property
    def own_ms_now(self) -> int:
        """Since the last collective was completed, or the generation joined."""
        return (time.monotonic_ns() - int(self._words[_OWN_SINCE])) // 1_000_000

    def seal_ledger(self, at: Position, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Record what the loader delivered for ``at``, before its gate is entered. Two units are kept."""
        slot = self._ledger_slot(at)
        kept = ids[:LEDGER_IDS_MAX]
        slot[_SEALED_STEP] = -2  # torn until the position stands again
        slot[_COUNT] = len(ids)
        slot[8 : 8 + len(kept)] = kept
        slot[_SEALED_PHASE], slot[_SEALED_IN] = at.phase, self._words[_GENERATION]
        slot[_SEALED_STEP] = at.step

    def seal_snapshot(self, index: int, step: int) -> None:
        """Snapshot slot ``index`` (0 or 1) now holds ``step``, whole; -1 while it is being written."""
        self._words[_SNAPSHOT_0 + index] = step + 1

    def want_mirror(self, step: int, keep: int, generation: int) -> None:
        """Other trays shall have a copy of the sealed snapshot of ``step``, or its parity, besides that of ``keep`` (-1: none).
        ``generation``: in which all ranks took it."""
        self._words[_MIRROR_KEEP] = keep + 1
        self._words[_MIRROR_GENERATION] = generation
        self._words[_MIRROR_WANTED] = step + 1

    @property
    def mirroring(self) -> bool:
        """What was wanted last has not succeeded or failed yet."""
        return int(self._words[_MIRROR_WANTED]) != abs(int(self._words[_MIRROR_DONE]))

    @property
    def mirrored(self) -> int:
        """The step that was wanted last, if other trays have it now; else -1."""
        done = int(self._words[_MIRROR_DONE])
        return done - 1 if done == int(self._words[_MIRROR_WANTED]) else -1

    @property
    def mirror_failed(self) -> int:
        """The step that was wanted last, if another tray could not be given it; else -1."""
        done = int(self._words[_MIRROR_DONE])
        return -done - 1 if done < 0 and -done == int(self._words[_MIRROR_WANTED]) else -1

    # -- written when the script has ended
    def failed_early(self) -> None:
        """It ended with an error, before it could meet another rank."""
        self._words[_EARLY] = 1

    @property
    def early(self) -> bool:
        return bool(self._words[_EARLY])

    # -- where the main thread is: asked by the agent, told by the control thread
    def ask_place(self) -> None:
        self._words[_PLACE_ASKED] += 1

    @property
    def place_asked(self) -> bool:
        """And not told yet."""
        return bool(self._words[_PLACE_ASKED] != self._words[_PLACE_TOLD])

    def tell_place(self, place: str) -> None:
        asked = int(self._words[_PLACE_ASKED])
        self._write_text(_PLACE_TEXT, place, _LIFELINE)
        self._words[_PLACE_TOLD] = asked

    def device_at(self, unreached: int, unpassed: int) -> None:
        """Of the collectives that the host has called for, by their numbers, from 1: the first to which the device has not come, as it computes what
        stands before it; and the first that it has not passed. 0: there is none. Written by the control thread, and when all are known to be over."""
        self._words[_UNREACHED], self._words[_UNPASSED] = unreached, unpassed

    def tell_spins(self, since_ns: int, seen_ns: int) -> None:
        """Since when the main thread spins (`rackrun.worker.process.spin_loops`), as seen at ``seen_ns``; 0: it does not."""
        self._words[_SPINS_SINCE], self._words[_SPINS_SEEN] = since_ns, seen_ns

    @property
    def spins(self) -> tuple[int, int]:
        """As told by `tell_spins`."""
        return int(self._words[_SPINS_SINCE]), int(self._words[_SPINS_SEEN])

    @property
    def place(self) -> str:
        """What was told last; "": nothing."""
        return self._read_text(_PLACE_TEXT, _LIFELINE)

    @property
    def unit_name(self) -> str:
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
        self._words[_MIRROR_DONE] = (step + 1) * (1 if well else -1)

    # -- read by the agent
    @property
    def mirror_wanted(self) -> tuple[int, int, int]:
        """Step, the step to keep besides it, and the generation in which it was taken."""
        wanted, keep, generation = (int(self._words[i]) for i in (_MIRROR_WANTED, _MIRROR_KEEP, _MIRROR_GENERATION))
        return wanted - 1, keep - 1, generation

    @property
    def tick_ns(self) -> int:
        return int(self._words[_TICK])

    @property
    def activity(self) -> Activity:
        return Activity(int(self._words[_ACTIVITY]))

    @property
    def since_ns(self) -> int:
        return int(self._words[_SINCE])

    @property
    def at(self) -> Position:
        return Position(int(self._words[_STEP]), int(self._words[_PHASE]))

    @property
    def collectives(self) -> tuple[int, int]:
        """How many were entered and completed in this generation; on the device, where there is one."""
        entered, completed = int(self._words[_ENTERED]), int(self._words[_COMPLETED])
        if not self._words[_BY_DEVICE]:
            return entered, completed
        unreached, unpassed = int(self._words[_UNREACHED]), int(self._words[_UNPASSED])
        if unreached:
            entered = unreached - 1
        return entered, entered - 1 if 0 < unpassed <= entered else entered

    @property
    def blocked_mark(self) -> int:
        """Another one for each `tell_blocked`; 0: the main thread is not known to be blocked."""
        return int(self._words[_BLOCKED])

    @property
    def blocked(self) -> CollectiveWait | None:
        """In what the main thread is blocked now, as told last."""
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
        """As `enter` says."""
        return int(self._words[_LEAST_MS])

    @property
    def own_ms(self) -> int:
        """While it waits in a collective: how long the rank's own code took before it entered that."""
        return max(int(self._words[_SINCE]) - int(self._words[_OWN_SINCE]), 0) // 1_000_000

    def ledger(self, at: Position) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """The ids delivered for ``at``, or None when they are not (or no longer) here, whole."""
        slot = self._ledger_slot(at)
        if (int(slot[_SEALED_STEP]), int(slot[_SEALED_PHASE])) != (at.step, at.phase) or int(
            slot[_COUNT]
        ) > LEDGER_IDS_MAX:
            return None
        return slot[8 : 8 + int(slot[_COUNT])].copy()

    def ledger_generation(self, at: Position) -> int:
        """In which the ids for ``at``, that are here, were delivered: perhaps as another rank than now."""
        return int(self._ledger_slot(at)[_SEALED_IN])

    def snapshots(self) -> dict[int, int]:
        """Step of each sealed snapshot -> the slot that holds it."""
        found = {int(self._words[_SNAPSHOT_0 + index]) - 1: index for index in (0, 1)}
        found.pop(-1, None)
        return found

    def _ledger_slot(self, at: Position) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        start = _WORDS + _SLOT_WORDS * (at.step % 2)
        return self._words[start : start + _SLOT_WORDS]

    # -- used by `rackrun.link.robust_mutex`
    @property
    def lifeline_address(self) -> int:
        return int(self._words.ctypes.data) + 8 * _LIFELINE

    @property
    def lifeline_held(self) -> bool:
        return bool(self._words[_LIFELINE_HELD])

    @lifeline_held.setter
    def lifeline_held(self, held: bool) -> None:
        self._words[_LIFELINE_HELD] = held

    def close(self) -> None:
        del self._words
        self._map.close()
