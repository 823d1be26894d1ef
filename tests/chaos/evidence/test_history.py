"""The history of a run: a line for all that happens, each with its kind and its cause."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos.evidence.history import (
    Committed,
    Entry,
    HistoryWriter,
    RungChosen,
    Started,
    Strike,
    StrikeConfirmed,
    read_history,
    write_history,
)
from rackrun.errors import UsageError


def told(*lines: tuple[str, dict[str, Any]], give_up: bool = False) -> list[dict[str, Any]]:
    file = io.StringIO()
    history = HistoryWriter(file)
    for at, (what, more) in enumerate(lines):
        history.tell(what, float(at), **more)
    if give_up:
        history.give_up(99.0)
    return [json.loads(line) for line in file.getvalue().splitlines()]


STRIKE = ("strike", {"strike": 0, "fault": {"fault": "kill"}, "whom": ["rank 2"], "slots": [("t0/2", 3)]})


@pytest.mark.parametrize(("took", "kind"), [(True, "ok"), (False, "fail"), (None, "info")])
def test_a_strike_is_invoked_and_what_comes_of_it_names_it_as_its_cause(took: bool | None, kind: str) -> None:
    strike, begun, confirmed = told(
        STRIKE, ("begun", {"strike": 0}), ("confirmed", {"strike": 0, "took": took, "detail": "gone"})
    )
    assert (strike["type"], strike["cause"]) == ("invoke", None)
    assert (begun["type"], begun["cause"]) == ("info", strike["id"])
    assert (confirmed["type"], confirmed["cause"]) == (kind, strike["id"])


def test_a_strike_that_nobody_confirms_is_told_as_unknown_when_the_job_is_over() -> None:
    *_, last = told(STRIKE, give_up=True)
    assert (last["what"], last["type"], last["took"], last["at_s"]) == ("confirmed", "info", None, 99.0)
    assert len(told(STRIKE, ("confirmed", {"strike": 0, "took": True, "detail": ""}), give_up=True)) == 2


def test_what_is_no_entry_is_not_written() -> None:
    with pytest.raises(Exception, match="earthquake"):
        told(("earthquake", {}))
    with pytest.raises(Exception, match="step"):
        told(("committed", {}))


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries: list[Entry] = [
        Started(at_s=0.0, id="h1", pid=7),
        Strike(
            at_s=1.0, type="invoke", id="h2", strike=0, fault={"fault": "kill"}, whom=("rank 1",), slots=(("t0/1", 4),)
        ),
        StrikeConfirmed(at_s=1.5, type="ok", id="h3", cause="h2", strike=0, took=True, detail="gone", struck_s=1.25),
    ]
    write_history(tmp_path / "history.jsonl", entries)
    assert read_history(tmp_path / "history.jsonl") == entries


def test_of_a_harness_that_was_killed_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, [Committed(at_s=1.0, id="h1", step=0), Committed(at_s=2.0, id="h2", step=1)])
    path.write_bytes(path.read_bytes()[:-20])
    assert [entry.at_s for entry in read_history(path)] == [1.0]


def test_another_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"what":"committed","at_s":1.0,"id":"h1","step":0}\n{"what":"committed"}\n\n')
    with pytest.raises(UsageError, match=r"history\.jsonl:2"):
        read_history(path)
    with pytest.raises(UsageError, match="No such file"):
        read_history(tmp_path / "none")


def test_a_history_of_format_1_is_read_without_rules(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(
        '{"what":"started","at_s":0.0,"id":"h1","pid":7,"format":1}\n'
        '{"what":"decided","at_s":1.0,"id":"j2","by":"job","generation":2,"rung":"swap","reason":"swap: cheap"}\n'
    )
    started, decided = read_history(path)
    assert isinstance(started, Started)
    assert started.format == 1
    assert isinstance(decided, RungChosen)
    assert decided.rule == ""
