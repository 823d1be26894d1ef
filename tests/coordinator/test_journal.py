"""What is on disk, and what happens when it cannot be."""

from __future__ import annotations

import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rackrun.coordinator.journal import Journal, JournalError, digest_of
from rackrun.core.events import WorkerElastic
from rackrun.core.ids import Incarnation, SlotId
from tests.coordinator.fakes import unit
from tests.coordinator.test_driver import BREAK, RESUME

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from rackrun.coordinator.journal import Journal
from tests.coordinator.test_driver import BREAK
journal = Journal(Path({path!r}), run_id="job-1")
for at_ms in range(5):
    journal.persist(BREAK, at_ms)
os.write(1, b"persisted")
os.kill(os.getpid(), 9)
"""


def query(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_generation_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    ran = subprocess.run([sys.executable, "-c", WRITER.format(root=str(ROOT), path=str(path))], stdout=subprocess.PIPE)
    assert ran.returncode == -signal.SIGKILL
    assert ran.stdout == b"persisted"
    assert query(path, "SELECT generation, stage, at_ms FROM generations") == [(2, "break", at) for at in range(5)]


def test_persisting_takes_milliseconds(journal: Journal, record_property: pytest.RecordProperty) -> None:
    """Of the processor; how long a disk takes, to which others write too, is told and not judged."""
    times, busy = [], []
    for at_ms in range(50):
        began, began_busy = time.perf_counter(), time.thread_time()
        journal.persist(RESUME, at_ms)
        times.append(time.perf_counter() - began)
        busy.append(time.thread_time() - began_busy)
    record_property("persist_ms_median", statistics.median(times) * 1e3)
    assert statistics.median(busy) < 0.03


def test_telemetry_is_written_behind_and_flushed_at_the_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    for step in range(1000):
        journal.unit(unit(step, 0, ids=step.to_bytes(8, "little")), 1.0)
        journal.event(WorkerElastic(slot=SlotId("t/0"), incarnation=Incarnation(1)))
    journal.fact("exit_code", 0)
    journal.close()
    assert query(journal.path, "SELECT count(*), max(step) FROM units") == [(1000, 999)]
    assert query(journal.path, "SELECT count(*), max(id) FROM events") == [(1000, 1000)]
    assert query(journal.path, "SELECT value FROM meta WHERE key = 'exit_code'") == [("0",)]


def test_digest_mode_keeps_a_count_and_a_digest_only(tmp_path: Path) -> None:
    ids = b"".join(number.to_bytes(8, "little") for number in (5, 6, 7))
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", ledger="digest")
    journal.unit(unit(0, 0, ids=ids), 1.0)
    journal.close()
    assert query(journal.path, "SELECT count, digest, ids FROM ledger") == [(3, digest_of(ids), None)]


def fill_disk(connection: sqlite3.Connection) -> None:
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages}")


def test_a_full_disk_for_telemetry_is_reported_once_and_does_not_end_the_job(tmp_path: Path) -> None:
    troubles: list[str] = []
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", on_trouble=troubles.append)
    fill_disk(journal._telemetry)
    for step in range(2000):
        journal.unit(unit(step, 0, ids=os.urandom(800)), 1.0)
    assert journal.flush()
    journal.persist(BREAK, 1)  # the generation still has room
    journal.close()
    assert len(troubles) == 1
    assert "full" in troubles[0]
    assert "Remedy" in troubles[0]
    assert query(journal.path, "SELECT value FROM meta WHERE key = 'rows_lost'")[0][0] == str(journal.rows_lost)
    assert journal.rows_lost > 0


def test_a_full_disk_for_a_generation_is_an_error(journal: Journal) -> None:
    fill_disk(journal._synchronous)
    with pytest.raises(JournalError, match=r"generation 2 could not be written.*full.*Remedy"):
        persist_until_full(journal)


def persist_until_full(journal: Journal) -> None:
    for at_ms in range(1000):
        journal.persist(RESUME, at_ms)


def test_a_journal_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="choose another --out-dir"):
        Journal(tmp_path / "missing" / "journal.sqlite", run_id="job-1")
