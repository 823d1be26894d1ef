"""Where the ranks of a job are, read from its journal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.report.rank_placement import read_placement
from rackrun.core.machine.state_replay import EVENTS
from rackrun.protocol.commands import SetTimer
from rackrun.protocol.events import Event, LossNotRepeated, SlowRanksChanged, TimerFired, TrayJoined, TrayStoodStill
from rackrun.protocol.ids import Generation, Incarnation, Position, SlotId, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import StandstillsGathered

CONFIG = JobConfig(trays_min=1, trays_max=1, spares=0)
TOLD: tuple[Event, ...] = (
    TrayJoined(at_ms=5, tray=TrayId("a"), host="here", slots=2, store="127.0.0.1:1", snapshots="127.0.0.1:2"),
    SlowRanksChanged(at_ms=6, generation=Generation(1), slow=()),
    LossNotRepeated(at_ms=7, slot=SlotId("a/0"), incarnation=Incarnation(1), at=Position(3)),
)


def test_every_event_that_is_selected_from_a_journal_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id="run", facts={"config": msgspec.json.encode(CONFIG).decode()})
    for event in TOLD:
        assert isinstance(event, EVENTS)
        journal.event(event)
    journal.fact("ended_ms", 10)
    journal.close()
    assert [*read_placement(path).standings] == ["a/0", "a/1"]


@pytest.mark.parametrize("gathered", [True, False], ids=["today's", "from before reports were gathered"])
def test_probation_for_standstills_is_read_from_a_journal(tmp_path: Path, gathered: bool) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id="run", facts={"config": msgspec.json.encode(CONFIG).decode()})
    for tray in ("a", "b"):
        journal.event(
            TrayJoined(at_ms=5, tray=TrayId(tray), host="here", slots=1, store=f"{tray}:1", snapshots=f"{tray}:2")
        )
    for at_ms in (10_000, 20_000, 30_000):
        journal.event(TrayStoodStill(at_ms=at_ms, tray=TrayId("b"), for_ms=2_000))
        if gathered:
            journal.event(TimerFired(at_ms=at_ms + 1_000, timer=StandstillsGathered()))
    journal.fact("ended_ms", 40_000)
    journal.close()
    standings = read_placement(path).standings
    assert "its tray stood still 3 times" in standings[SlotId("b/0")].why
    assert not standings[SlotId("a/0")].why


def test_a_report_of_a_standstill_that_is_still_being_gathered_puts_nothing_on_probation(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id="run", facts={"config": msgspec.json.encode(CONFIG).decode()})
    for tray in ("a", "b"):
        journal.event(
            TrayJoined(at_ms=5, tray=TrayId(tray), host="here", slots=1, store=f"{tray}:1", snapshots=f"{tray}:2")
        )
    for at_ms in (10_000, 20_000, 30_000):
        cause = journal.event(TrayStoodStill(at_ms=at_ms, tray=TrayId("b"), for_ms=2_000))
        journal.command(SetTimer(timer=StandstillsGathered(), at_ms=at_ms + 1_000), at_ms, cause)
    journal.fact("ended_ms", 30_001)
    journal.close()
    assert not read_placement(path).standings[SlotId("b/0")].why
