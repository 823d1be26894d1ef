"""What is on disk, and what happens when it cannot be."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sqlite3
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.coordinator.journal import file_systems
from rackrun.coordinator.journal.journal_writer import Journal, JournalError, digest_of
from rackrun.coordinator.shell.driver import Driver
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import StopRequested, WorkerElastic
from rackrun.protocol.ids import Incarnation, SlotId
from rackrun.protocol.wire import FillerState
from tests.coordinator.fakes import Onlooker, ScriptedCore, unit
from tests.coordinator.shell.test_driver import BREAK, RESUME

ROOT = Path(__file__).resolve().parents[3]
WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from rackrun.coordinator.journal.journal_writer import Journal
from tests.coordinator.shell.test_driver import BREAK
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


def test_persisting_takes_milliseconds(journal: Journal, record_property: Callable[[str, object], None]) -> None:
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


# -- nothing that is said ends the writer's thread
ODD = ["\ud800", "a\x00b", "x" * 100_000]


@pytest.mark.parametrize("text", ODD, ids=["surrogate", "nul", "long"])
def test_odd_text_is_written_in_every_table(journal: Journal, text: str) -> None:
    slot = SlotId(text)
    journal.event(StopRequested(because=text, exit_code=2**70))
    journal.command(Notice(text=text), 1, 1)
    journal.unit(msgspec.structs.replace(unit(2**63, 0, ids=b"12345678"), slot=slot), math.nan)
    journal.filler(
        FillerState(slot=slot, incarnation=Incarnation(2**64), start=1, state=text, seconds=math.inf, cpu_s=0.0), 1.0
    )
    journal.fact(text, text)
    journal.persist(msgspec.structs.replace(BREAK, because=text), 2**40)
    assert journal.flush()
    assert (journal.dead, journal.rows_lost) == ("", 0)
    rows = {
        table: query(journal.path, f"SELECT count(*) FROM {table}")
        for table in ("events", "units", "ledger", "fillers", "generations")
    }
    assert rows == {"events": [(2,)], "units": [(1,)], "ledger": [(1,)], "fillers": [(1,)], "generations": [(1,)]}


def test_a_row_that_cannot_be_written_costs_itself_and_no_other(tmp_path: Path) -> None:
    troubles: list[str] = []
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", on_trouble=troubles.append)
    for step in range(10):
        journal.unit(unit(step, 0), 1.0)
        journal._put("INSERT INTO nowhere VALUES (?)", (step,))
    assert journal.flush()
    assert query(journal.path, "SELECT count(*) FROM units") == [(10,)]
    journal.close()
    assert journal.rows_lost == 10
    assert len(troubles) == 1


def test_who_is_told_of_trouble_and_fails_does_not_end_the_writer(tmp_path: Path) -> None:
    def fails(_text: str) -> None:
        raise BrokenPipeError

    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", on_trouble=fails)
    journal._put("INSERT INTO nowhere VALUES (?)", (1,))
    journal.unit(unit(1, 0), 1.0)
    assert journal.flush()
    journal.close()
    assert query(journal.path, "SELECT count(*) FROM units") == [(1,)]


class Gone(BaseException):
    """What no handler of errors catches."""


def test_a_writer_that_ends_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    died: list[str] = []
    journal.on_death = died.append

    def end(_rows: object) -> None:
        raise Gone("struck")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "_write", end)
        journal.unit(unit(1, 0), 1.0)
        assert not journal.flush(60.0), "nobody waits for who is dead"
        with pytest.raises(JournalError, match="not written any more"):
            journal.persist(BREAK, 1)
    assert died == ["its thread ended (Gone: struck)"]
    journal.fact("exit_code", 3)
    journal.close()
    assert query(journal.path, "SELECT value FROM meta WHERE key = 'exit_code'") == [("3",)], (
        "how it ended is written all the same"
    )


async def test_a_job_whose_journal_has_ended_stops_with_the_reason(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(ScriptedCore(), journal, run_id="job-1", observer=Onlooker())

    def end(_rows: object) -> None:
        raise Gone("struck")

    monkeypatch.setattr(journal, "_write", end)
    driver.begin()
    over = await asyncio.wait_for(driver.finished, 60)
    assert over.exit_code == 3
    assert "is not written any more: its thread ended (Gone: struck)" in over.because
    assert over.remedy
    monkeypatch.undo()
    driver.close()


# -- where it lies
def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
        journal.persist(BREAK, 1)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        journal.close()
    finally:
        os.umask(umask)
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_it_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalError):
        Journal(tmp_path / "journal.sqlite", run_id="job-1")
    assert not (tmp_path / "elsewhere").exists()


def test_there_is_no_write_ahead_log_on_file_systems_that_hosts_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "magic_of", lambda _path: 0x6969)
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    assert query(journal.path, "PRAGMA journal_mode") != [("wal",)]
    assert not (tmp_path / "journal.sqlite-shm").exists()
    reader = sqlite3.connect(journal.path)
    for step in range(20):
        journal.unit(unit(step, 0), 1.0)
        journal.persist(BREAK, step)
        assert reader.execute("SELECT count(*) FROM generations").fetchall() == [(step + 1,)]
    reader.close()
    journal.close()
    assert journal.rows_lost == 0
    assert query(journal.path, "SELECT count(*) FROM units") == [(20,)]


def test_on_a_shared_file_system_every_connection_syncs_in_full_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback journal that is synced with NORMAL can be damaged by a loss of power; a write-ahead log cannot."""
    monkeypatch.setattr(file_systems, "magic_of", lambda _path: 0x0BD00BD0)
    said: list[str] = []
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", on_notice=said.append)
    for connection in (journal._synchronous, journal._telemetry):
        assert connection.execute("PRAGMA journal_mode").fetchall() == [("truncate",)]
        assert connection.execute("PRAGMA synchronous").fetchall() == [(2,)], "2 is FULL"
    journal.unit(unit(0, 0), 1.0)
    journal.close()
    assert len(said) == 1
    assert "is on Lustre" in said[0]
    assert "local disk" in said[0]


def test_on_a_local_file_system_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "magic_of", lambda _path: 0xEF53)
    said: list[str] = []
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1", on_notice=said.append)
    assert journal._telemetry.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
    journal.close()
    assert said == []


@pytest.mark.parametrize(("magic", "name"), [(0x6969, "NFS"), (0x0BD00BD0, "Lustre"), (0xEF53, ""), (0x01021994, "")])
def test_which_file_systems_are_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, magic: int, name: str) -> None:
    monkeypatch.setattr(file_systems, "magic_of", lambda _path: magic)
    assert file_systems.is_shared(tmp_path) == name


def test_the_kernel_says_what_a_file_system_is() -> None:
    assert file_systems.magic_of(Path("/proc")) == 0x9FA0
    assert file_systems.is_shared(Path("/no/such/path")) == ""
