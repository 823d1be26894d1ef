"""Each record is written once, in order, wherever the sink or the job was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rackrun.coordinator.sinks.position_file import PositionFile, lock
from rackrun.coordinator.sinks.sink import Key, Record, Refused, Rewind, item_from, line_of
from rackrun.coordinator.sinks.sink_child import Feed
from tests.coordinator.sinks.openings import record


class Recording:
    run = ""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin(self, newest: Key | None, run: str) -> Key | None:
        return newest

    def write(self, one: Record) -> None:
        if "bad" in one.values:
            raise Refused("it is bad")
        self.steps.append(one.key.step)

    def flush(self) -> None: ...

    def rewind(self, step: int) -> str:
        self.steps = [one for one in self.steps if one <= step]
        return ""

    def close(self) -> str:
        return ""


def test_steps_done_again_after_a_resume_are_not_written_again() -> None:
    sink = Recording()
    feed = Feed(sink, Key(4))
    for step in (2, 3, 4, 5, 6):
        feed.take(record(step))
    assert sink.steps == [5, 6]
    assert feed.newest == Key(6)


def test_of_a_step_that_was_written_in_part_the_rest_is_written() -> None:
    sink = Recording()
    feed = Feed(sink, Key(4, 0, 1))
    for call in range(4):
        feed.take(record(4, call=call))
    assert sink.steps == [4, 4]


def test_a_phase_comes_after_its_step_and_before_the_next() -> None:
    assert Key(4) < Key(4, 0, 1) < Key(4, 1) < Key(4, 2) < Key(5)


def test_what_was_wrong_is_written_again() -> None:
    sink = Recording()
    feed = Feed(sink, None)
    for item in (record(3), record(4), record(5), Rewind(3), record(4), record(5), record(5)):
        feed.take(item)
    assert sink.steps == [3, 4, 5]


def test_a_record_that_is_refused_is_counted_and_stops_nothing() -> None:
    sink = Recording()
    feed = Feed(sink, None)
    for one in (record(0), record(1, bad=1), record(2)):
        feed.take(one)
    assert (sink.steps, feed.refused, feed.why) == ([0, 2], 1, "it is bad")


@pytest.mark.parametrize("item", [record(7, 1, 2, loss=float("inf"), text="ü\n", n=3), Rewind(4)])
def test_items_cross_the_pipe_unchanged(item: Record | Rewind) -> None:
    line = line_of(9, item)
    assert b"\n" not in line
    assert item_from(line) == (9, item)


def test_the_position_is_kept_for_each_target(tmp_path: Path) -> None:
    file = PositionFile(tmp_path, "otlp:http://a")
    assert file.load() is None
    file.save("job-1", "", Key(4, 0, 1))
    file.close()
    again = PositionFile(tmp_path, "otlp:http://a")
    saved = again.load()
    assert saved is not None
    assert (saved.training, saved.newest) == ("job-1", Key(4, 0, 1))
    again.close()
    other = PositionFile(tmp_path, "otlp:http://b")
    assert other.load() is None
    other.close()


def test_two_processes_do_not_write_at_a_time(tmp_path: Path) -> None:
    file = PositionFile(tmp_path, "otlp:http://a")
    with (file.path.with_suffix(".lock")).open("rb") as other, pytest.raises(TimeoutError, match="another process"):
        lock(other.fileno(), file.path, 0.1)
    file.close()
