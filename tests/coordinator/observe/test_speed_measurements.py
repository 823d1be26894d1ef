"""What the coordinator measures for the core, and how seldom it says so."""

from __future__ import annotations

from rackrun.coordinator.observe.speed_measurements import SpeedMeasurements
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.wire import StateCopied
from tests.coordinator.fakes import unit


def copied(kind: str, step: int, size: int = 0, seconds: float = 0.0, outcome: str = "done") -> StateCopied:
    return StateCopied(
        slot=SlotId("tray-00/0"),
        incarnation=Incarnation(1),
        generation=Generation(1),
        rank=Rank(0),
        at=Position(step),
        kind=kind,
        outcome=outcome,
        bytes=size,
        seconds=seconds,
    )


def test_a_steady_pace_is_told_once() -> None:
    pace, told = SpeedMeasurements(), []
    for step in range(50):
        pace.committed(unit(step, 0, seconds=0.1 + 0.001 * (step % 3)))
        pace.committed(unit(step, 1, seconds=9.0))
        told.append(pace.news())
    assert [news.step_s for news in told if news is not None] == [0.101]


def test_a_pace_that_changes_is_told_again_and_steps_done_again_do_not_count() -> None:
    pace, told = SpeedMeasurements(), []
    for step in range(200):
        pace.committed(unit(step, 0, seconds=0.1 if step < 100 else 0.2))
        pace.committed(unit(step, 0, seconds=30.0, attempt=1))
        told += [news.step_s for news in [pace.news()] if news is not None and news.step_s is not None]
    assert [round(seconds, 2) for seconds in told] == [0.1, 0.15, 0.2] or told == [0.1, 0.2]


def test_a_checkpoint_is_told_when_it_is_on_disk_with_what_lies_between_two() -> None:
    pace = SpeedMeasurements()
    pace.copied(copied("resume", 9), 0.0)
    pace.copied(copied("checkpoint", 19, outcome="passed_over"), 50_000.0)
    pace.copied(copied("checkpoint", 29, outcome="failed"), 60_000.0)
    first = pace.news()
    pace.copied(copied("checkpoint", 39), 100_000.0)
    second = pace.news()
    pace.copied(copied("checkpoint", 39), 100_500.0)
    assert first is not None
    assert second is not None
    assert (first.checkpoint, first.checkpoint_every_s) == (9, None)
    assert (second.checkpoint, second.checkpoint_every_s) == (39, 100.0)
    assert pace.news() is None


def test_the_size_of_a_ranks_state_and_the_speed_of_its_copies_are_the_snapshots() -> None:
    pace = SpeedMeasurements()
    pace.copied(copied("snapshot", 3, size=2_000_000), 0.0)
    pace.copied(copied("copy", 3, size=2_000_000, seconds=0.01), 0.0)
    pace.committed(unit(4, 0))
    news = pace.news()
    assert news is not None
    assert (news.state_bytes, news.copy_bytes_per_s) == (2e6, 2e8)
