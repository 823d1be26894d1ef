"""The journal: everything that a job did, in one SQLite file; generations are on disk before they are announced.

Theory of operation. Two connections share the file (WAL). The *synchronous* one belongs to the event loop and runs with
``synchronous=FULL``: `Journal.persist` returns once a generation is on disk, a few milliseconds, and raises
`JournalError` if it is not. Everything else is telemetry: it is queued and written by a thread, in transactions of at
most `BATCH_ROWS` rows, every `BATCH_S`. Losing telemetry is reported once and does not end the job. If a row cannot
be written, only that row is lost. If the thread ends unexpectedly, `Journal.on_death` is called, and waiting callers
return.

WAL does not work on file systems that hosts share (`rackrun.coordinator.journal.file_systems`). There a rollback
journal is used, with which a reader may delay a writer for an instant. Both connections then run with
``synchronous=FULL``: a rollback journal that is synced with NORMAL can be damaged by a loss of power
(https://www.sqlite.org/pragma.html#pragma_synchronous).

Format (`FORMAT` in ``meta``). Times in ``*_ms`` are milliseconds of the coordinator's monotonic clock since it began;
``wall`` is Unix time in seconds, for people. Bodies are JSON; a number that JSON lacks (NaN) is null there.

=============  =====================================================================================================
``meta``       key, value: format, run_id, protocol, began_wall, began_monotonic_s (of that clock, as the host has it),
               config (`rackrun.protocol.job_config.JobConfig` as JSON), and whatever the launcher adds; steps_rescaled (how many steps were
               done again because a gradient had no scale yet, or had outgrown it), where there are any; at the end also exit_code, because, ended_ms, rows_lost
``events``     id, cause (id of the event that a command answers, NULL for an event), kind (``event``, ``command``),
               name, at_ms, wall, body, rule (the rule of the core that sent a command, by its name: a type of event,
               timer or fact, or a condition of `rackrun.core.machine.rules.RULES`; NULL for an event, and where the
               driver itself ended the job; older journals of this format lack the column): every core event and
               command, in the order in which they were handled
``generations``  id, generation, stage (``break``, ``resume``), at_ms, wall, body (the whole command): on disk *before*
               it is announced
``recoveries``  generation, fault_ms, body (`rackrun.coordinator.observe.recoveries.RecoveryRecord`)
``units``      step, phase, rank, generation, attempt, committed_at_ms, seconds, gate (float64, little endian), own_s (of the
               seconds; 0: not known)
``ledger``     step, phase, rank, generation, count, digest (BLAKE2b, 16 bytes), ids (int64, little endian; NULL with
               ``--ledger digest``)
``folded``     step, phase, generation, samples, untold (more, by its gate), ids (a digest of all ranks', or NULL), seconds (of the slowest), vain (how often it was computed in
               vain): units so old that their rows of ``units`` and ``ledger`` are gone (`rackrun.coordinator.journal.folding`)
``findings``   kind, what: errors that were found in folded units before their rows were removed
``fillers``    slot, incarnation, start, at_ms, body (the last `rackrun.protocol.wire.FillerState` of that start)
=============  =====================================================================================================

A unit that is computed again after a rollback has rows of both generations.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rackrun.coordinator.journal.file_systems import is_shared
from rackrun.coordinator.journal.folding import KEEP_ROWS, Folding
from rackrun.coordinator.journal.schema import FORMAT, SCHEMA
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.errors import RackrunError
from rackrun.protocol.commands import BreakGeneration, Command, ResumeGeneration
from rackrun.protocol.encodable import INT_MAX, clean, encodable, json_of
from rackrun.protocol.events import Event
from rackrun.protocol.wire import PROTOCOL, FillerState, UnitCommitted

__all__ = ["BATCH_ROWS", "FORMAT", "Journal", "JournalError", "LedgerMode", "digest_of"]

BATCH_ROWS = 256
BATCH_S = 0.1

LedgerMode: TypeAlias = Literal["ids", "digest"]

_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_GENERATION = "INSERT INTO generations (generation, stage, at_ms, wall, body) VALUES (?, ?, ?, ?, ?)"
_RECOVERY = "INSERT OR REPLACE INTO recoveries VALUES (?, ?, ?)"
_UNIT = "INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_LEDGER = "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?)"
_FILLER = "INSERT OR REPLACE INTO fillers VALUES (?, ?, ?, ?, ?)"

_Row: TypeAlias = tuple[str, tuple[object, ...]]


class JournalError(RackrunError):
    """A generation could not be written to disk."""


class Journal:
    """One job's journal, open for writing.

    ``on_trouble`` is called on the writer's thread: once when telemetry can no longer be written, and once when the
    file grows because old units cannot be folded. ``on_notice`` is called once, before the constructor returns, if the
    file is on a file system that hosts share. Raises JournalError if the file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        facts: Mapping[str, str] | None = None,
        ledger: LedgerMode = "ids",
        keep_rows: int = KEEP_ROWS,
        on_trouble: Callable[[str], None] | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.rows_lost = 0
        self._grows = False
        """Whether it was reported that old units cannot be folded for now."""
        self._ids = ledger == "ids"
        self._rescaled: set[int] = set()
        self._on_trouble = on_trouble
        self.on_death: Callable[[str], None] = lambda _because: None
        """Called on the writer's thread when that thread ends unexpectedly."""
        self.dead = ""
        """Why the writer's thread ended unexpectedly; "": it has not."""
        self._next_id = 1
        shared = is_shared(path.parent)
        mode, synchronous = ("TRUNCATE", "FULL") if shared else ("WAL", "NORMAL")
        try:
            _make_private(path)
            self._synchronous = _connect(path, "FULL", mode)
            self._synchronous.execute("PRAGMA wal_autocheckpoint=0")  # the writer's thread checkpoints, not the loop
            self._synchronous.executescript(SCHEMA)
            self._telemetry = _connect(path, synchronous, mode)
            self._folding = Folding(self._telemetry, keep_rows)
            began = {"format": FORMAT, "run_id": run_id, "protocol": PROTOCOL, "began_wall": time.time()}
            told = [(key, clean(str(value))) for key, value in (began | dict(facts or {})).items()]
            self._synchronous.executemany(_META, told)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(
                f"the journal {path} cannot be made: {error}.", remedy="make room there, or choose another --out-dir."
            ) from error
        if shared and on_notice is not None:
            on_notice(
                f"the journal {path} is on {shared}: it is written without a write-ahead log, which such file systems do "
                f"not support. Persisting a generation takes longer. Remedy: choose an --out-dir on a local disk."
            )
        self._one_writer = threading.Lock()  # instead of SQLite's busy handler, which sleeps in whole milliseconds
        self._queue: deque[_Row] = deque()
        self._queued = threading.Event()
        self._closing = threading.Event()
        self._put_rows = 0  # by the loop
        self._done_rows = 0  # by the writer, under _progress
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._write_batches, name="rackrun-journal", daemon=True)
        self._thread.start()

    # -- before anyone is told
    def persist(self, command: BreakGeneration | ResumeGeneration, at_ms: int) -> None:
        """Write ``command`` to disk before returning. Raises JournalError if that fails."""
        if isinstance(command, BreakGeneration):
            stage, generation = "break", command.generation
        else:
            stage, generation = "resume", command.plan.generation
        if self.dead:
            raise JournalError(f"the journal {self.path} is not written any more: {self.dead}.", remedy="see above.")
        try:
            with self._one_writer:  # held elsewhere for one small transaction without a sync at most
                self._synchronous.execute(_GENERATION, (generation, stage, at_ms, time.time(), _json(command)))
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise JournalError(
                f"generation {generation} could not be written to {self.path}: {error}.",
                remedy="make room on that disk, or choose another --out-dir.",
            ) from error

    # -- telemetry: never blocks
    def event(self, event: Event) -> int:
        """Queue an event; return its id, which is the cause of the commands that follow from it."""
        return self._entry("event", event, event.at_ms, None, None)

    def command(self, command: Command, at_ms: int, cause: int, rule: str = "") -> None:
        """Queue a command. ``cause``: the id of the event that it follows from. ``rule``: the rule of the core that
        sent it; "": none did. Never blocks."""
        self._entry("command", command, at_ms, cause, rule or None)

    def recovery(self, recovery: RecoveryRecord) -> None:
        """Queue a recovery; a later call for the same generation and fault replaces it. Never blocks."""
        self._put(_RECOVERY, (recovery.generation, recovery.fault_ms, recovery))

    def unit(self, unit: UnitCommitted, at_ms: float) -> None:
        """Queue a rank's committed unit, with its gate and its ledger of sample ids. Never blocks."""
        where = (unit.at.step, unit.at.phase, unit.rank, unit.generation)
        gate = struct.pack(f"<{len(unit.gate)}d", *unit.gate)
        self._put(_UNIT, (*where, unit.attempt, at_ms, unit.seconds, gate, unit.own))
        if unit.rescaled and unit.at.step not in self._rescaled:
            self._rescaled.add(unit.at.step)
            self.fact("steps_rescaled", len(self._rescaled))
        if unit.ids:
            ids = unit.ids if self._ids else None
            self._put(_LEDGER, (*where, len(unit.ids) // 8, digest_of(unit.ids), ids))

    def filler(self, told: FillerState, at_ms: float) -> None:
        """Queue the state of a filler; the last one of each start is kept. Never blocks."""
        self._put(_FILLER, (told.slot, told.incarnation, told.start, at_ms, told))

    def fact(self, key: str, value: object) -> None:
        """Queue a fact about the run as text, such as its configuration or exit code. Never blocks."""
        self._put(_META, (key, clean(str(value))))

    # -- the end
    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all telemetry queued so far is written or lost, at most ``timeout_s`` seconds. Return whether it
        is."""
        wanted = self._put_rows
        with self._progress:
            self._progress.wait_for(lambda: self._done_rows >= wanted or self.dead != "", timeout_s)
            return self._done_rows >= wanted

    def close(self) -> None:
        self._closing.set()
        self._queued.set()
        self._thread.join()
        while self._queue:  # what came after the writer's death
            self._write([self._queue.popleft()])
        if self.rows_lost:
            with contextlib.suppress(sqlite3.Error):  # the disk is as full as it was; `on_trouble` has said so
                self._synchronous.execute(_META, ("rows_lost", str(self.rows_lost)))
        self._telemetry.close()
        self._synchronous.close()

    def _entry(self, kind: str, body: Event | Command, at_ms: int, cause: int | None, rule: str | None) -> int:
        number = self._next_id
        self._next_id += 1
        self._put(_EVENT, (number, cause, kind, type(body).__name__, at_ms, time.time(), body, rule))
        return number

    def _put(self, sql: str, values: tuple[object, ...]) -> None:
        self._queue.append((sql, values))
        self._put_rows += 1
        self._queued.set()

    # -- the writer's thread
    def _write_batches(self) -> None:
        try:
            while not (self._closing.is_set() and not self._queue):
                self._queued.wait()
                self._closing.wait(BATCH_S)  # let a batch gather
                self._queued.clear()
                while self._queue:
                    rows = [self._queue.popleft() for _ in range(min(BATCH_ROWS, len(self._queue)))]
                    self._write(rows)
                    if self._folding.due:
                        self._fold()
                    with self._progress:
                        self._done_rows += len(rows)
                        self._progress.notify_all()
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody may wait for this thread without knowing
            self._died(f"its thread ended ({type(error).__name__}: {error})")
        else:
            if not self._closing.is_set():
                self._died("its thread ended")

    def _died(self, because: str) -> None:
        with self._progress:
            self.dead = because
            self._progress.notify_all()
        self.on_death(because)

    def _write(self, rows: list[_Row]) -> None:
        """Write as many of the rows as possible: a row that cannot be written does not affect others."""
        try:
            plain = [(sql, _plain(values)) for sql, values in rows]
            plain.sort(key=itemgetter(0))  # stable: the order within a table stays
            self._write_plain(plain)
            self._folding.wrote(sum(sql is _UNIT for sql, _ in rows))
        except Exception as error:  # noqa: BLE001 - this thread goes on, whatever a row holds
            if len(rows) > 1 and not (isinstance(error, sqlite3.OperationalError) and self.rows_lost):
                for row in rows:
                    self._write([row])
                return
            self._lost(rows, error)

    def _write_plain(self, plain: list[_Row]) -> None:
        with self._transaction():
            for sql, group in groupby(plain, key=itemgetter(0)):
                self._telemetry.executemany(sql, [values for _, values in group])

    def _fold(self) -> None:
        try:
            with self._transaction():
                rows = self._folding.some()
            self._folding.wrote(-rows)  # not before: what is taken back is there again
        except Exception as error:  # noqa: BLE001 - this thread goes on, whatever a row holds
            again = isinstance(error, sqlite3.OperationalError)  # a full disk, say: the next batch tries again
            if not again:
                self._folding.give_up()
            elif self._grows or not self._folding.overdue:
                return
            self._grows = True
            if self._on_trouble is not None:
                with contextlib.suppress(Exception):
                    self._on_trouble(
                        f"rows of old units in the journal {self.path} cannot be put together ({type(error).__name__}: {error}), so it grows with "
                        f"every step. Training goes on. Remedy: {'make room on that disk.' if again else 'please report this.'}"
                    )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._one_writer:
            try:
                self._telemetry.execute("BEGIN IMMEDIATE")
                yield
                self._telemetry.execute("COMMIT")
            except BaseException:
                if self._telemetry.in_transaction:
                    self._telemetry.execute("ROLLBACK")
                raise

    def _lost(self, rows: list[_Row], error: Exception) -> None:
        first = not self.rows_lost
        self.rows_lost += len(rows)
        if first and self._on_trouble is not None:
            full = isinstance(error, sqlite3.Error)
            with contextlib.suppress(Exception):  # whoever is told has troubles of his own
                self._on_trouble(
                    f"the journal {self.path} takes no more telemetry: {error}. Training goes on; the report and the "
                    f"ledger check will be incomplete. Remedy: make room on that disk."
                    if full
                    else f"the journal {self.path} has lost a row that cannot be written ({type(error).__name__}: {error}). Training "
                    f"goes on; the report may be incomplete. Remedy: please report this."
                )


def digest_of(ids: bytes) -> bytes:
    """Return the 16-byte digest of sample ids (int64, little endian) that the ledger keeps in either mode."""
    return hashlib.blake2b(ids, digest_size=16).digest()


def _make_private(path: Path) -> None:
    """Create an empty file that only the owner can read, if there is none. Files that SQLite creates beside it have the
    same mode."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def _connect(path: Path, synchronous: str, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    return connection


def _plain(values: tuple[object, ...]) -> tuple[object, ...]:
    """Convert values to types that SQLite can store."""
    return tuple(
        _json(one)
        if isinstance(one, msgspec.Struct)
        else one
        if one is None or isinstance(one, float | bytes) or (isinstance(one, int) and -INT_MAX <= one <= INT_MAX)
        else encodable(one)
        for one in values
    )


def _json(body: object) -> str:
    """Return ``body`` as JSON text, whatever text and numbers it holds (`rackrun.protocol.encodable`)."""
    return json_of(body).decode()
