"""``trace.json`` is what Perfetto takes: complete slices that nest, tracks with names, arrows that begin and end in slices."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos.report.chrome_trace import JOB, RACKS, RANKS, TRAYS
from rackrun.chaos.report.write_reports import make_report
from tests.chaos.recorded import write_run

Events = list[dict[str, Any]]


def check_trace(path: Path) -> Events:
    """Strictly, by the rules of the Trace Event Format and of Perfetto's importer."""
    trace = json.loads(path.read_text())
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    events: Events = trace["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    names: dict[str, set[tuple[int, int]]] = defaultdict(set)
    flows: dict[int, Events] = defaultdict(list)
    for event in events:
        where = event["pid"], event["tid"]
        assert isinstance(event["name"], str)
        assert event["name"]
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
                names[event["name"]].add(where)
                continue
            case "X":
                assert event["dur"] >= 1
                tracks[where].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in "tpg"
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "s" | "t" | "f":
                flows[event["id"]].append(event)
            case other:
                raise AssertionError(other)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
    pids = {event["pid"] for event in events}
    assert {pid for pid, _ in names["process_name"]} == pids
    assert tracks.keys() <= names["thread_name"]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    for where, slices in tracks.items():
        check_nesting(where, slices)
    for arrow in flows.values():
        phases = [event["ph"] for event in arrow]
        assert (phases[0], phases[-1], set(phases[1:-1]) <= {"t"}) == ("s", "f", True)
        assert len({event["name"] for event in arrow}) == 1
        for event in arrow:
            spans = tracks[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in spans), f"{event} is in no slice"
            assert event["ph"] == "s" or event["bp"] == "e"
    return events


def check_nesting(where: object, slices: list[tuple[int, int]]) -> None:
    open_until: list[int] = []
    for begin, end in slices:
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{begin} to {end} on {where} overlaps, and is not inside"
        open_until.append(end)


def named(events: Events, kind: str, phase: str = "M") -> list[str]:
    return [event["args"]["name"] for event in events if event["ph"] == phase and event["name"] == kind]


def test_there_is_a_track_for_each_rank_tray_slot_and_rack(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", ranks=8)
    make_report(out)
    events = check_trace(out / "trace.json")
    assert set(named(events, "process_name")) == {
        "job: ranks are killed",
        "ranks",
        "rack rack-0",
        "tray tray-00 (rack rack-0)",
        "tray tray-01 (rack rack-0)",
    }
    threads = named(events, "thread_name")
    assert [f"rank {rank}" for rank in range(8)] == [name for name in threads if name.startswith("rank ")]
    assert sum(name.startswith("slot ") for name in threads) == 10


def test_an_arrow_leads_from_each_fault_over_detection_and_decision_to_the_first_good_step(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", kills={5: 1, 9: 3})
    make_report(out)
    events = check_trace(out / "trace.json")
    for number in (1, 2):
        arrow = [event for event in events if event.get("id") == number]
        assert [event["pid"] for event in arrow] == [TRAYS, JOB, JOB, RANKS]
        assert [event["ph"] for event in arrow] == ["s", "t", "t", "f"]
    last = next(event for event in events if event["ph"] == "f" and event["id"] == 1)
    first = [
        e for e in events if e["ph"] == "X" and e["name"] == "step 5" and e["tid"] == last["tid"] and e["pid"] == RANKS
    ]
    assert first[0]["ts"] <= last["ts"] < first[0]["ts"] + first[0]["dur"]
    assert first[0]["args"]["generation"] == 2


def test_the_clocks_of_all_processes_are_one_axis(tmp_path: Path) -> None:
    """The coordinator began half a second after the harness; who is killed is noticed 3 ms later, not earlier."""
    out = write_run(tmp_path / "out", kills={5: 1})
    make_report(out)
    slices = {event["name"]: event for event in check_trace(out / "trace.json") if event["ph"] == "X"}
    fault, noticed = slices["kill of rank 1"], slices["WorkerExited tray-00/1"]
    assert 2_000 <= noticed["ts"] - fault["ts"] <= 4_000
    recovery = next(event for name, event in slices.items() if name.startswith("rank 1 lost"))
    restore = slices["restore"]
    assert recovery["ts"] < restore["ts"] < restore["ts"] + restore["dur"] < recovery["ts"] + recovery["dur"]


def test_a_slot_shows_who_sat_there(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", kills={5: 1})
    make_report(out)
    events = check_trace(out / "trace.json")
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == TRAYS}
    seats = {
        slot: [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (TRAYS, tracks[f"slot {slot}"])]
        for slot in ("tray-00/0", "tray-00/1", "tray-00/4")
    }
    assert seats == {"tray-00/0": ["rank 0"], "tray-00/1": ["rank 1", "spare"], "tray-00/4": ["spare", "rank 1"]}


def test_steps_away_from_faults_are_merged_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rackrun.chaos.report.chrome_trace.STEP_SLICES", 300)
    out = write_run(tmp_path / "out", steps=400, kills={200: 1})
    make_report(out)
    events = check_trace(out / "trace.json")
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == RANKS and e["tid"] == 2]
    assert sum(e.get("args", {}).get("units", 1) for e in mine if e["name"] != "restore") == 400
    assert "step 200" in [e["name"] for e in mine]
    assert len(mine) < 150


def test_a_run_without_a_journal_or_without_strikes_has_a_trace(tmp_path: Path) -> None:
    calm = write_run(tmp_path / "calm", kills={})
    make_report(calm)
    assert not [event for event in check_trace(calm / "trace.json") if event["ph"] in "stf"]
    gone = write_run(tmp_path / "gone")
    (gone / "faulted" / "run" / "journal.sqlite").unlink()
    make_report(gone)
    assert RACKS in {event["pid"] for event in check_trace(gone / "trace.json")}
