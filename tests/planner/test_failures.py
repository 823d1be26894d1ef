"""When something fails, who repairs it, and failures that somebody has written down."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.planner.inputs.failure_traces import FailureTrace, read_trace
from rackrun.chaos.planner.inputs.failures import FailureProcess, Failures, UnitFailure, slots_of, units
from rackrun.chaos.planner.inputs.fleet import Fleet
from rackrun.chaos.planner.inputs.repair_crews import Crews
from tests.planner.cases import DAY, HOUR, trays

FLEET = Fleet(racks=100)


def first_times(process: FailureProcess, seed: int = 1) -> dict[int, float]:
    return {strike.unit: at_s for at_s, strike in Failures([process], FLEET, seed, 1e12).begin()}


def renewals(process: FailureProcess, count: int = 4000) -> float:
    """The mean time from one failure of a unit to the next, in hours."""
    draw = stream(7, "renewals")
    return mean(process.wait(0.0, draw.expovariate(1.0), 1.0) for _ in range(count)) / HOUR


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_the_mean_is_the_mtbf_whatever_the_shape(shape: float) -> None:
    assert renewals(trays(8000, 4, shape=shape)) == pytest.approx(8000, rel=0.06)


def test_a_falling_hazard_strikes_the_young_and_spares_the_old() -> None:
    young = sum(at_s < 500 * HOUR for at_s in first_times(trays(8000, 4, shape=0.5)).values())
    usual = sum(at_s < 500 * HOUR for at_s in first_times(trays(8000, 4)).values())
    old = sum(at_s < 500 * HOUR for at_s in first_times(trays(8000, 4, shape=0.5, age_s=20000 * HOUR)).values())
    assert young > 2 * usual > 2 * old


def test_lemons_fail_more_often_and_the_fleet_does_not() -> None:
    plain, soured = trays(8000, 4), trays(8000, 4, lemons=0.05, lemon_factor=10.0)
    by = 400 * HOUR
    struck = [unit for unit, at_s in first_times(soured).items() if at_s < by]
    usual = [unit for unit, at_s in first_times(plain).items() if at_s < by]
    lemons = Failures([soured], FLEET, 1, 1e12)._lemons[0]
    assert len(lemons) == 90
    assert len([unit for unit in struck if unit in lemons]) > 4 * 0.05 * len(struck)
    assert len(struck) == pytest.approx(len(usual), rel=0.3)


def test_burn_in_adds_failures_at_first_only() -> None:
    process = trays(8000, 4, burn_in_s=100 * HOUR, burn_in_factor=20.0)
    times = [at_s / HOUR for at_s in first_times(process).values()]
    before, after = sum(at < 100 for at in times), sum(100 <= at < 200 for at in times)
    assert before > 8 * after
    aged = trays(8000, 4, burn_in_s=100 * HOUR, burn_in_factor=20.0, age_s=100 * HOUR)
    assert sum(at_s < 100 * HOUR for at_s in first_times(aged).values()) < before / 8


def test_what_strikes_when_is_the_seed_s_and_no_other_process_moves_it() -> None:
    rack = FailureProcess(name="rack", domain="rack", mtbf_s=2000 * HOUR, repair_s=8 * HOUR)
    alone = Failures([trays(8000, 4)], FLEET, 3, 30 * DAY).begin()
    beside = [one for one in Failures([trays(8000, 4), rack], FLEET, 3, 30 * DAY).begin() if one[1].source == 0]
    assert alone == beside
    assert alone != Failures([trays(8000, 4)], FLEET, 4, 30 * DAY).begin()


def test_a_rack_s_power_takes_all_of_it() -> None:
    assert slots_of(FLEET, UnitFailure(0, "rack", 3, 0.0)) == range(216, 288)
    assert slots_of(FLEET, UnitFailure(0, "tray", 19, 0.0)) == range(76, 80)
    assert slots_of(FLEET, UnitFailure(0, "gpu", 7, 0.0)) == range(7, 8)
    assert [units(FLEET, domain) for domain in ("gpu", "tray", "rack")] == [7200, 1800, 100]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtbf_s": 0.0},
        {"mtbf_s": -1.0},
        {"mtbf_s": float("nan")},
        {"repair_s": -1.0},
        {"shape": 0.0},
        {"lemons": 1.5},
        {"lemon_factor": 0.0},
        {"shape": 0.5, "burn_in_s": 1.0},
    ],
)
def test_a_law_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PlannerError, match="Remedy"):
        FailureProcess(**{"name": "tray", "domain": "tray", "mtbf_s": 1.0, **wrong})  # type: ignore[arg-type]


def test_a_repair_longer_than_the_run_is_refused() -> None:
    with pytest.raises(PlannerError, match="simulate longer"):
        Failures([trays(8000, 800)], FLEET, 1, 30 * DAY)


def test_crews_are_asked_in_turn() -> None:
    crews = Crews(2)
    one, two, three, four = (UnitFailure(0, "tray", unit, 1.0) for unit in range(4))
    assert [crews.take(strike) for strike in (one, two, three, four)] == [True, True, False, False]
    assert (crews.done(), crews.done(), crews.done(), crews.done()) == (three, four, None, None)
    assert (crews.busy, crews.queued_max) == (0, 2)
    assert all(Crews().take(one) for _ in range(100))
    with pytest.raises(PlannerError, match="crews"):
        Crews(0)


def test_a_trace_is_struck_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "hours,where,kind,repair_hours\n\n# the second rack\n30,1,hardware,6\n2.5,0/17,process,\n9,3/2,stall,0\n"
    )
    found = read_trace(path, FLEET)
    assert found == [
        (2.5 * HOUR, UnitFailure(0, "tray", 17, 0.0)),
        (9 * HOUR, UnitFailure(0, "tray", 56, 0.0, stalls=True)),
        (30 * HOUR, UnitFailure(0, "rack", 1, 6 * HOUR)),
    ]
    trace = FailureTrace(found, 10 * HOUR)
    assert [at_s for at_s, _ in trace.begin()] == [2.5 * HOUR, 9 * HOUR]
    assert trace.again(found[0][1], 0.0) is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1,0/1,hardware", "3 fields"),
        ("-1,0/1,process,0", "hours '-1'"),
        ("soon,0/1,process,0", "hours 'soon'"),
        ("1,100,hardware,1", "no rack '100' among 100"),
        ("1,0/18,hardware,1", "no tray '18' among 18"),
        ("1,0/x,hardware,1", "no tray 'x'"),
        ("1,0,gremlins,1", "of kind 'gremlins'"),
        ("1,0,hardware,0", "cannot take a repair of 0 h"),
        ("1,0,process,5", "cannot take a repair of 5 h"),
        ("1,0,hardware,-5", "repair_hours '-5'"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"1,0,hardware,2\n{line}\n")
    with pytest.raises(PlannerError, match=r"trace\.csv, line 2") as refused:
        read_trace(path, FLEET)
    assert what in str(refused.value)


def test_a_trace_without_a_failure_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("hours,where,kind,repair_hours\n")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe1")
    for name, what in (("empty.csv", "no failure"), ("none.csv", "cannot be read"), ("bytes.csv", "cannot be read")):
        with pytest.raises(PlannerError, match=what):
            read_trace(tmp_path / name, FLEET)
