"""What is told of fillers reaches Prometheus and the report."""

from __future__ import annotations

import sqlite3
from io import StringIO
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.observe.filler_usage import FillerMetrics
from rackrun.coordinator.report.run_report import read_report
from rackrun.coordinator.shell.driver import Driver
from rackrun.ctl.run_render import render_report
from rackrun.protocol.commands import StopJob
from rackrun.protocol.ids import Incarnation, SlotId, TrayId
from rackrun.protocol.wire import FillerState
from tests.coordinator.fakes import Onlooker, ScriptedCore


def told(
    slot: str, incarnation: int, start: int, state: str, seconds: float, cpu_s: float, **more: object
) -> FillerState:
    fields = {"slot": SlotId(slot), "incarnation": Incarnation(incarnation), "start": start, **more}
    return FillerState(state=state, seconds=seconds, cpu_s=cpu_s, **fields)  # type: ignore[arg-type]


STORY = (
    told("tray-00/4", 5, 1, "running", 0.0, 0.0),
    told("tray-00/4", 5, 1, "running", 10.0, 4.0),
    told("tray-00/4", 5, 1, "ended", 12.0, 5.0, because="exit code 0"),
    told("tray-00/4", 5, 2, "running", 0.0, 0.0),
    told("tray-00/4", 5, 2, "ended", 30.0, 20.0, because="the spare is needed", gone_s=0.21),
    told("tray-00/4", 7, 3, "running", 0.0, 0.0),
    told("tray-01/0", 9, 1, "running", 0.0, 0.0),
    told("tray-01/0", 9, 1, "given up", 0.1, 0.0, because="exit code 1"),
)


@pytest.fixture
async def driver(tmp_path: Path) -> Driver:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    return Driver(ScriptedCore(), journal, run_id="job-1", observer=Onlooker())


def test_the_page_counts_each_start_once_and_what_it_used_as_it_is_told() -> None:
    registry = CollectorRegistry()
    metrics = FillerMetrics(registry)
    for one in STORY:
        metrics.record_state(one)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"rackrun_filler{name}")

    assert (value("_starts_total"), value("s_running"), value("s_given_up_total")) == (4, 1, 1)
    assert value("_seconds_total") == pytest.approx(42.1)
    assert value("_cpu_seconds_total") == 25.0
    assert (value("_gone_seconds_count"), value("_gone_seconds_sum")) == (1, 0.21)
    metrics.drop_tray(TrayId("tray-00"))
    assert value("s_running") == 0


async def test_the_report_says_by_slot_what_fillers_made_of_the_wait_also_when_told_after_the_end(
    driver: Driver, tmp_path: Path
) -> None:
    driver.receive_telemetry(STORY[:-1])
    driver.stop(StopJob(exit_code=0, because="done"))
    driver.receive_telemetry(STORY[-1:])
    assert isinstance(driver._journal, Journal)
    driver._journal.close()
    report = read_report(tmp_path / "journal.sqlite")
    one, other = report.fillers
    assert (one.slot, one.starts, one.restarts, one.had_to_go) == ("tray-00/4", 3, 1, 1)
    assert (one.seconds, one.cpu_s, one.gone_s_max, one.given_up) == (42.0, 25.0, 0.21, "")
    assert one.utilisation == pytest.approx(25 / 42)
    assert (other.slot, other.starts, other.gone_s_max, other.given_up) == ("tray-01/0", 1, None, "exit code 1")
    written = StringIO()
    render_report(Console(file=written, width=120), report)
    text = written.getvalue()
    (row,) = (line.split() for line in text.splitlines() if line.startswith("tray-00/4 "))
    assert " ".join(row) == "tray-00/4 42.0 s 25.0 s 60% 3 1 1 at most 0.21 s"
    assert "tray-01/0: given up, it ended at once ten times (exit code 1)" in text


async def test_a_journal_from_before_there_were_fillers_is_read(driver: Driver, tmp_path: Path) -> None:
    assert isinstance(driver._journal, Journal)
    driver._journal.close()
    connection = sqlite3.connect(tmp_path / "journal.sqlite")
    connection.execute("DROP TABLE fillers")
    connection.close()
    assert read_report(tmp_path / "journal.sqlite").fillers == ()
