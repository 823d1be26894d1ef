"""What `rackctl report` shows of causes, in a journal that the real core and driver have written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.chaos.evidence.journal_replay import replay
from rackrun.chaos.report.analysis.journal_timeline import read_recorded
from rackrun.coordinator.journal.command_causes import CommandCause
from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.report.rank_placement import read_placement
from rackrun.protocol.events import JournalFailed
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.job_config import JobConfig
from tests.coordinator.journaled_job import JournaledJob
from tests.ctl.conftest import Said


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A job whose rank 1 was killed and swapped, and whose rank 0 then left a failing GPU. At last its disk was full."""
    folder = tmp_path / "run"
    folder.mkdir()
    journal = Journal(folder / "journal.sqlite", run_id="job-1")
    job = JournaledJob(JobConfig(trays_min=2, trays_max=2, spares=2), journal)
    for tray in ("a", "b"):
        job.join(tray, 2)
    job.train()
    job.now = 1_000
    job.exits(job.members[1])
    job.park_all()
    job.resume_all()
    job.now = 2_000
    job.judges(job.members[0], Health.DEGRADED)
    job.pause_all()
    job.park_all(passed=6)
    job.resume_all()
    job.now = 3_000
    job.tell(JournalFailed(because="disk full"))
    job.end()
    journal.close()
    return folder


def make_old(path: Path) -> None:
    """Remove the column ``rule``, as in a journal that was written before there was one."""
    connection = sqlite3.connect(path)
    with connection:
        connection.executescript("""
            ALTER TABLE events RENAME TO with_rules;
            CREATE TABLE events (
                id INTEGER PRIMARY KEY, cause INTEGER, kind TEXT, name TEXT, at_ms INTEGER, wall REAL, body TEXT);
            INSERT INTO events SELECT id, cause, kind, name, at_ms, wall, body FROM with_rules;
            DROP TABLE with_rules;
        """)
    connection.close()


def test_the_report_shows_why_each_command_was_sent(run: Path, rackctl: Callable[..., Said]) -> None:
    text = " ".join(rackctl("report", run).out.split())
    assert "sent at 3.000 s: StopJob by JournalFailed (event 49)" in text
    assert "rank 0: GPU 0 is degraded: it was tested (nvml) [by SwapDue, after DeviceJudged of a (event 30)]" in text
    assert "sent at 1.000 s: BreakGeneration by WorkerExited of b/0 (event 17)" in text
    assert "sent at 1.000 s: Decided, ResumeGeneration by WorkerParked of a/0 (event 23)" in text
    assert "FenceWorker, BreakGeneration by WorkersMustGo, after WorkerPaused of b/1 (event 36)" in text


def test_the_report_has_the_causes_in_json(run: Path, rackctl: Callable[..., Said]) -> None:
    report = rackctl("report", run, "--json").json
    assert report["stop"]["commands"] == {"StopJob": 1}
    assert report["notices"][-1]["cause"] == {
        "rule": "SwapDue",
        "event": "DeviceJudged",
        "of": "a",
        "event_id": 30,
    }
    broken, planned = report["recoveries"][0]["commands"]
    assert broken == {
        "at_ms": 1000,
        "commands": {"BreakGeneration": 1},
        "cause": {"rule": "WorkerExited", "event": "WorkerExited", "of": "b/0", "event_id": 17},
    }
    assert planned["commands"] == {"Decided": 1, "ResumeGeneration": 1}
    with sqlite3.connect(run / "journal.sqlite") as journal:
        assert journal.execute("SELECT name FROM events WHERE id = 17").fetchall() == [("WorkerExited",)]
    journal.close()


def test_the_timeline_of_a_chaos_run_has_the_rules(run: Path) -> None:
    said = read_recorded(run.parent, None).said
    assert ("Decided", "WorkerParked") in {(one.name, one.rule) for one in said}
    assert all(one.rule for one in said)


def test_an_old_journal_is_read_without_rules(run: Path, rackctl: Callable[..., Said]) -> None:
    path = run / "journal.sqlite"
    make_old(path)
    said = rackctl("report", run)
    assert said.code == 0
    assert "sent at 1.000 s: BreakGeneration after WorkerExited of b/0 (event 17)" in said.out
    report = rackctl("report", run, "--json").json
    causes = [sent["cause"] for one in report["recoveries"] for sent in one["commands"]]
    assert causes
    assert not any(cause["rule"] for cause in causes)
    assert not replay(path).difference
    assert len(read_placement(path).standings) == 4
    assert all(not one.rule for one in read_recorded(run.parent, None).said)


@pytest.mark.parametrize(
    "body", ['{"type":"WorkerExited","slot":3}', '{"type":"TimerFired","name":"of later","at_ms":1}']
)
def test_an_event_of_another_version_is_named_as_a_cause(run: Path, rackctl: Callable[..., Said], body: str) -> None:
    connection = sqlite3.connect(run / "journal.sqlite")
    with connection:
        connection.execute("UPDATE events SET body = ? WHERE id = 17", (body,))
    connection.close()
    said = rackctl("report", run)
    assert said.code == 0
    assert "sent at 1.000 s: BreakGeneration by WorkerExited (event 17)" in said.out


def test_a_cause_in_words() -> None:
    def words(rule: str, event: str, of: str) -> str:
        return str(CommandCause(rule=rule, event=event, of=of, event_id=7))

    assert words("TrayLost", "TrayLost", "a") == "by TrayLost of a (event 7)"
    assert words("SlotFreed", "TrayLost", "a") == "by SlotFreed, after TrayLost of a (event 7)"
    assert words("GatherOver", "TimerFired", "GatherOver") == "by GatherOver (event 7)"
    assert words("SwapDue", "TimerFired", "GrowthDue") == "by SwapDue, after GrowthDue (event 7)"
    assert words("", "TrayLost", "a") == "after TrayLost of a (event 7)"
    assert not str(CommandCause())
