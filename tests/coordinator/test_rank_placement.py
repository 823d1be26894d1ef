"""Where the ranks of a job are, read from its journal."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.report.rank_placement import read_placement
from rackrun.core.machine.state_replay import EVENTS
from rackrun.protocol.events import Event, LossNotRepeated, SlowRanksChanged, TrayJoined
from rackrun.protocol.ids import Generation, Incarnation, Position, SlotId, TrayId
from rackrun.protocol.job_config import JobConfig

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
