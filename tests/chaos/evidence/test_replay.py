"""A journal told to the core once more says the same, or somebody decided by what is in no event."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.evidence.journal_replay import replay
from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.events import Event, TimerFired, TrayJoined
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import timer_named

CONFIG = JobConfig(trays_min=1, trays_max=1, spares=0)
EVENTS: tuple[Event, ...] = (
    TimerFired(timer=timer_named("begin"), at_ms=1),
    TrayJoined(at_ms=5, tray=TrayId("tray-00"), host="here", slots=2, store="127.0.0.1:1", snapshots="127.0.0.1:2"),
)


@pytest.fixture
def journal(tmp_path: Path) -> Callable[..., Path]:
    """``journal(ended=True) -> Path``: of a job that has begun."""

    def write(*, ended: bool = True) -> Path:
        path = tmp_path / "journal.sqlite"
        made = Journal(path, run_id="run", facts={"config": msgspec.json.encode(CONFIG).decode()})
        core = ControlPlane(CONFIG)
        for event in EVENTS:
            cause = made.event(event)
            for command in core.handle(event):
                made.command(command, event.at_ms, cause)
        if ended:
            made.fact("ended_ms", 10)
        made.close()
        return path

    return write


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql)
    connection.close()


def test_the_same_events_give_the_same_commands(journal: Callable[..., Path]) -> None:
    found = replay(journal())
    assert (found.events, found.difference, found.unknown) == (len(EVENTS), "", "")
    assert found.commands >= len(EVENTS)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("UPDATE events SET body = replace(body, 'tray-00/1', 'tray-00/0') WHERE kind = 'command'", "now:"),
        ("DELETE FROM events WHERE id = (SELECT min(id) FROM events WHERE kind = 'command')", "TimerFired at 1 ms"),
        ("DELETE FROM events WHERE id = (SELECT max(id) FROM events)", "nothing; now:"),
        ("INSERT INTO events VALUES (99, 1, 'command', 'Notice', 9, 0.0, '{}', 'SwapDue')", "now: nothing"),
    ],
)
def test_another_command_one_less_and_one_more_are_seen(sql: str, said: str, journal: Callable[..., Path]) -> None:
    path = journal()
    change(path, sql)
    assert said in replay(path).difference


def test_where_the_writer_was_killed_its_last_commands_may_be_missing(journal: Callable[..., Path]) -> None:
    path = journal(ended=False)
    change(path, "DELETE FROM events WHERE id = (SELECT max(id) FROM events)")
    assert not replay(path).difference


@pytest.mark.parametrize(
    "sql", ["INSERT INTO meta VALUES ('rows_lost', '7')", "DELETE FROM meta WHERE key = 'config'", "DELETE FROM meta"]
)
def test_what_the_journal_does_not_have_is_unknown(sql: str, journal: Callable[..., Path]) -> None:
    path = journal()
    change(path, sql)
    assert replay(path).unknown


def test_no_journal_is_unknown(tmp_path: Path) -> None:
    assert "no journal" in replay(tmp_path / "journal.sqlite").unknown
