"""A line of JSON for each run.log; the file itself says how far it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.sinks.json_lines import JsonLines, as_line
from rackrun.coordinator.sinks.sink import Key
from tests.coordinator.sinks.openings import opening, record


def opened(path: Path, *, fresh: bool = False) -> tuple[JsonLines, Key | None]:
    sink = JsonLines(opening("jsonl", path, path.parent, fresh=fresh))
    return sink, sink.begin(None, "")


def newest(path: Path) -> Key | None:
    sink, found = opened(path)
    sink.close()
    return found


def write(path: Path, *steps: int, fresh: bool = False) -> None:
    sink, _ = opened(path, fresh=fresh)
    for step in steps:
        sink.write(record(step))
    sink.flush()
    sink.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "of" / "values.jsonl"


def test_a_line_has_step_time_and_values() -> None:
    assert json.loads(as_line(record(12, loss=2.5, note="é"))) == {"step": 12, "time": 1012.0, "loss": 2.5, "note": "é"}
    assert json.loads(as_line(record(12, phase=2, error=1)))["phase"] == 2


def test_json_has_no_nan_so_it_is_a_text_that_float_reads() -> None:
    line = as_line(record(0, a=float("nan"), b=float("inf"), c=float("-inf")))
    values = json.loads(line, parse_constant=lambda _: pytest.fail("no JSON"))
    assert [float(values[name]) for name in "bc"] == [float("inf"), float("-inf")]
    assert values["a"] == "NaN"


def test_a_value_of_the_script_does_not_hide_the_step() -> None:
    assert json.loads(as_line(record(3, step=99))) == {"step": 3, "time": 1003.0, "log.step": 99}


def test_a_resumed_job_goes_on_after_the_last_line(path: Path) -> None:
    write(path, 0, 1, 2)
    sink, found = opened(path)
    assert found == Key(2)
    sink.write(record(3))
    sink.flush()
    sink.close()
    assert steps(path) == [0, 1, 2, 3]


def test_calls_of_one_step_are_counted_and_phases_told_apart(path: Path) -> None:
    sink, _ = opened(path)
    for one in (record(4), record(5), record(5, call=1), record(5, phase=1), record(5, phase=1, call=1)):
        sink.write(one)
    sink.flush()
    sink.close()
    assert newest(path) == Key(5, 1, 1)


@pytest.mark.parametrize("torn", ['{"step": 3, "ti', '{"step": 3, "time": 1.0}', "x" * 9000])
def test_a_last_line_without_an_end_is_cut(path: Path, torn: str) -> None:
    write(path, 0, 1, 2)
    with path.open("a") as file:
        file.write(torn)
    assert newest(path) == Key(2)
    assert steps(path) == [0, 1, 2]


def test_a_new_training_leaves_the_file_of_another_whole(path: Path) -> None:
    write(path, 0, 1, 2)
    write(path, 0, 1, fresh=True)
    write(path, 0, fresh=True)
    assert [steps(path.with_name(f"values.jsonl{end}")) for end in ("", ".1", ".2")] == [[0], [0, 1, 2], [0, 1]]


def test_a_file_of_something_else_is_neither_written_nor_cut(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("what somebody\nelse has written")
    with pytest.raises(ValueError, match="not such as --log-to writes"):
        opened(path)
    assert path.read_text() == "what somebody\nelse has written"


def test_values_that_were_wrong_are_taken_back(path: Path) -> None:
    sink, _ = opened(path)
    for one in (record(3), record(4), record(4, phase=1), record(5), record(6)):
        sink.write(one)
    sink.rewind(4)
    sink.write(record(5, loss=7.0))
    sink.flush()
    sink.close()
    assert steps(path) == [3, 4, 5], "a phase of the step is done again"
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 7.0


def test_a_full_disk_tears_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 0, 1, 2)
    whole = path.stat().st_size
    sink, _ = opened(path)
    real = os.write

    def some(fd: int, data: Any) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real(fd, data[:20])

    monkeypatch.setattr(os, "write", some)
    sink.write(record(3))
    with pytest.raises(OSError, match="No space left"):
        sink.flush()
    assert path.stat().st_size == whole
    monkeypatch.setattr(os, "write", real)
    sink.flush()
    sink.close()
    assert steps(path) == [0, 1, 2, 3]
