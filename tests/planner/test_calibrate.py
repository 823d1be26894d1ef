"""Costs from a real run, and a small job predicted with them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.calibrate import RunMeasurements, calibrated, read_run
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts, read_costs, write_costs
from rackrun.chaos.planner.predict import predict
from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.observe.recoveries import LostRank, RecoveryRecord
from rackrun.coordinator.report.goodput import Goodput
from rackrun.coordinator.report.run_report import LedgerCheck, RecoveryReport, Report
from rackrun.protocol.commands import ResumeGeneration, StartWorker
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId
from tests.coordinator.fakes import member, plan, unit

SPARE = SlotId("tray-00/2")


def recovery(
    kind: str, seconds: float, *, first_s: float = 0.6, how: str = "SIGKILL", **more: object
) -> RecoveryReport:
    found = RecoveryRecord(
        generation=2,
        kind=kind,
        because=kind,
        fault_ms=1000.0,
        resumed_ms=1000.0 + 1e3 * seconds,
        committed_ms=1000.0 + 1e3 * (seconds + first_s),
        lost=(LostRank(rank=Rank(1), slot=SlotId("tray-00/1"), how=how),),
        **more,  # type: ignore[arg-type]
    )
    return RecoveryReport(line=found.line(), recovery=found, seconds=found.seconds, stages=())


def report(*recoveries: RecoveryReport, steps: int = 100, other_s: float = 2.0) -> Report:
    return Report(
        run_id="job-1",
        exit_code=0,
        because="done",
        steps=steps,
        steps_redone=0,
        generations=1,
        recoveries=recoveries,
        notices=(),
        goodput=Goodput(
            wall_s=60.0,
            productive_s=0.5 * steps,
            startup_s=6.0,
            recovery_s=1.0,
            redone_s=1.0,
            other_s=other_s,
            ettr=0.9,
            ettr_since_first_step=0.95,
        ),
        ledger=LedgerCheck(units=steps, samples=0, distinct=0),
    )


def test_each_figure_comes_from_the_recoveries_that_show_it_and_says_so() -> None:
    costs = calibrated(
        RunMeasurements(
            report=report(
                recovery("swap", 0.3),
                recovery("swap", 0.5),
                recovery("swap", 0.4),
                recovery("swap", 60.0, rungs=("wait", "swap")),
                recovery("swap", 9_000.0, rungs=("hold", "swap")),
                recovery("swap", 70.0, overtaken=True),
                recovery("regroup", 0.1),
                recovery("resize", 2.1),
                recovery("restart", 9.0),
            )
        )
    )
    assert costs.step_s == 0.5
    assert costs.takeover_s == pytest.approx(0.4)
    assert costs.regroup_s == pytest.approx(0.1)
    assert costs.reenter_s == pytest.approx(2.0)
    assert costs.start_s == pytest.approx(9.0)
    assert costs.load_s == 0.0
    assert costs.first_step_s == pytest.approx(0.1)
    assert costs.detect_s == 0.0
    assert costs.between_steps_s == pytest.approx((2.0 - 8 * 0.1) / 100)
    assert costs.origin["takeover_s"] == "run job-1: median of 3 swaps, from the fault until all computed again"
    assert costs.guessed() == ["relaunch_s", "snapshot_s", "copy_s", "checkpoint_s", "write_s", "state_bytes"]


def test_what_a_run_does_not_show_stays_a_guess() -> None:
    costs = calibrated(RunMeasurements(report=report()))
    assert costs.takeover_s == PlanCosts().takeover_s
    assert {"takeover_s", "regroup_s", "detect_s", "start_s", "load_s"} <= set(costs.guessed())
    seen = calibrated(RunMeasurements(report=report(recovery("swap", 20.0, how="tray lost: no lease"))))
    assert "detect_s" in seen.guessed()


def test_a_run_without_steps_cannot_calibrate() -> None:
    with pytest.raises(PlannerError, match="no committed step"):
        calibrated(RunMeasurements(report=report(steps=0)))


def test_a_journal_tells_how_long_workers_take_to_start(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    begin = plan(1, member(0, "tray-00/0", 1), member(1, "tray-00/1", 2))

    def start(incarnation: int, at_ms: int) -> None:
        command = StartWorker(
            slot=SPARE,
            incarnation=Incarnation(incarnation),
            spare=True,
            rank=Rank(0),
            world_size=2,
            generation=Generation(1),
            store="",
            restarts=0,
        )
        journal.command(command, at_ms, 1)

    def ready(incarnation: int, at_ms: int) -> None:
        journal.event(WorkerReady(at_ms=at_ms, slot=SPARE, incarnation=Incarnation(incarnation)))

    start(3, 0)
    journal.persist(ResumeGeneration(plan=begin, because="begin"), 500)
    ready(3, 900)
    for step in range(4):
        for rank in (0, 1):
            journal.unit(unit(step, rank, generation=1), 600.0 + 100 * step)
    for incarnation, began, took in ((4, 2000, 1500), (5, 5000, 2500), (6, 9000, 2000)):
        start(incarnation, began)
        ready(incarnation, began + took)
    journal.fact("ended_ms", 20000)
    journal.close()
    run = read_run(tmp_path)
    assert run.starts_s == (0.9, 1.5, 2.5, 2.0)
    assert calibrated(run).start_s == pytest.approx(1.75)
    again = msgspec.structs.replace(run, report=report(recovery("restart", 4.0)))
    assert calibrated(again).start_s == pytest.approx(1.75)
    assert calibrated(again).load_s == pytest.approx(2.25)
    assert read_run(journal.path).starts_s == run.starts_s


def test_a_report_as_json_is_read_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(report(recovery("swap", 0.4))))
    assert calibrated(read_run(path)).takeover_s == pytest.approx(0.4)
    path.write_text("{}")
    with pytest.raises(PlannerError, match="no report"):
        read_run(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        read_run(tmp_path / "none.json")


def test_costs_are_a_file_that_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = PlanCosts(step_s=3.0, origin={"step_s": "a guess of mine"})
    path.write_text(write_costs(costs))
    assert read_costs(path) == costs
    for text in ("{", '{"step_s": "fast"}', '{"stepp_s": 1.0}', '{"step_s": -1.0}'):
        path.write_text(text)
        with pytest.raises(PlannerError, match="Remedy"):
            read_costs(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        read_costs(tmp_path / "none.json")


# -- a small job that is killed -----------------------------------------------------------------------------------------
SMALL = PlanCosts(step_s=0.25, detect_s=0.0, takeover_s=0.3, first_step_s=0.1, start_s=8.0)


def test_with_spares_enough_the_prediction_is_the_renewal_formula() -> None:
    """Two kills a minute for half an hour, as the soak has them."""
    found = predict(SMALL, ranks=4, spares=4, every_s=30.0, horizon_s=1800.0, even=True)
    assert found.kills == 59
    assert found.rungs == {"swap": 59.0}
    assert found.formula.value == pytest.approx(1 - (0.3 + 0.1 + 0.125) / 30)
    assert found.kept.mean == pytest.approx(found.formula.value, rel=0.005)


def test_what_a_step_costs_besides_is_in_no_comparison_with_the_run_without_faults() -> None:
    slower = msgspec.structs.replace(SMALL, between_steps_s=0.25)
    found = predict(slower, ranks=4, spares=4, every_s=30.0, horizon_s=1800.0)
    assert found.wall.mean == pytest.approx(found.kept.mean / 2)


def test_one_spare_is_sometimes_not_there_yet() -> None:
    one, four = (
        predict(SMALL, ranks=4, spares=spares, every_s=15.0, horizon_s=1800.0, seeds=range(2)) for spares in (1, 4)
    )
    assert one.kept.mean < four.kept.mean - 0.02
    assert set(one.rungs) - {"swap"}
    assert one.formula.value is None


def test_the_prediction_is_the_same_each_time() -> None:
    assert predict(SMALL, ranks=4, spares=2, every_s=20.0, horizon_s=900.0) == predict(
        SMALL, ranks=4, spares=2, every_s=20.0, horizon_s=900.0
    )


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"spares": -1}, {"every_s": 0.0}, {"horizon_s": -1.0}, {"seeds": ()}])
def test_a_job_that_cannot_be_predicted_is_refused(wrong: dict[str, object]) -> None:
    asked = {"ranks": 4, "spares": 1, "every_s": 30.0, "horizon_s": 60.0, **wrong}
    with pytest.raises(PlannerError, match="cannot be predicted"):
        predict(SMALL, **asked)  # type: ignore[arg-type]
