"""Derive the planner's costs from a real run, by its report (``rackctl report --json``) and its journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.coordinator.journal.journal_reader import open_journal
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.report.run_report import Report, read_report

__all__ = ["calibrated", "read_run"]

_REMEDY = "give the out-dir of a run, its journal.sqlite, or what rackctl report --json wrote."


class RunMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a real run."""

    report: Report
    starts_s: tuple[float, ...] = ()
    """Seconds from each worker's start until it was ready; only a journal has them."""


def read_run(path: Path) -> RunMeasurements:
    """Read a run from its out-dir, its journal, or its report as JSON.

    Raises PlannerError, or UsageError for a journal that cannot be read.
    """
    journal = path / "journal.sqlite" if path.is_dir() else path
    if journal.suffix == ".sqlite":
        return RunMeasurements(report=read_report(journal), starts_s=tuple(_starts(journal)))
    try:
        return RunMeasurements(report=msgspec.json.decode(path.read_bytes(), type=Report))
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.", remedy=_REMEDY) from error
    except msgspec.DecodeError as error:
        raise PlannerError(f"{path} is no report: {error}.", remedy=_REMEDY) from error


def calibrated(run: RunMeasurements) -> PlanCosts:
    """Return the costs that the run shows.

    A cost that it does not show stays a guess, and is named as one (`PlanCosts.guessed`). Raises PlannerError for a run
    without steps.
    """
    report = run.report
    if not report.steps or report.goodput.productive_s <= 0:
        raise PlannerError(f"run {report.run_id} has no committed step.", remedy="calibrate from a run that trained.")
    of = f"run {report.run_id}"
    done = [one.recovery for one in report.recoveries if not one.recovery.overtaken and one.seconds is not None]
    found: dict[str, float] = {"step_s": report.goodput.productive_s / report.steps}
    origin = {"step_s": f"{of}: {report.steps} steps, phases shared out"}

    def learn(name: str, values: Iterable[float], what: str) -> None:
        known = list(values)
        if known:
            found[name] = max(median(known), 0.0)
            origin[name] = f"{of}: median of {len(known)} {what}"

    learn("takeover_s", _seconds(done, "swap"), "swaps, from the fault until all computed again")
    learn("regroup_s", _seconds(done, "regroup"), "recoveries in which nobody was lost")
    learn("reenter_s", _seconds(done, "resize"), "changes of size, less a regroup")
    if "reenter_s" in found:
        found["reenter_s"] = max(found["reenter_s"] - found.setdefault("regroup_s", 0.0), 0.0)
        origin.setdefault("regroup_s", f"{of}: counted with reenter_s")
    extra = [
        (one.committed_ms - one.resumed_ms) / 1e3 - found["step_s"]
        for one in done
        if one.committed_ms is not None and one.resumed_ms is not None
    ]
    learn("first_step_s", extra, "first steps after a recovery, less a step")
    if done and not any(lost.how.startswith("tray lost") for one in done for lost in one.lost):
        found["detect_s"] = 0.0
        origin["detect_s"] = f"{of}: no tray was lost, and the end of a process is seen at once"
    learn("start_s", run.starts_s, "workers")
    restarts = list(_seconds(done, "restart"))
    if run.starts_s:
        learn("load_s", (one - found["start_s"] for one in restarts), "restarts, less a start")
    elif restarts:
        learn("start_s", restarts, "restarts, with what they load")
        found["load_s"], origin["load_s"] = 0.0, f"{of}: counted with start_s"
    found["between_steps_s"] = max(report.goodput.other_s - sum(max(one, 0.0) for one in extra), 0.0) / report.steps
    origin["between_steps_s"] = f"{of}: what is in no step and no recovery, shared out"
    return PlanCosts(**found, origin=origin)


def _seconds(done: Iterable[RecoveryRecord], kind: str) -> Iterable[float]:
    """Yield the seconds of the recoveries of this kind that did not wait for a worker or a rack."""
    for one in done:
        if one.kind == kind and not {"wait", "hold", "acquire"} & set(one.rungs) and one.seconds is not None:
            yield one.seconds


def _starts(journal: Path) -> Iterable[float]:
    """Yield the seconds from each worker's start until it was ready."""
    with open_journal(journal) as (connection, _):
        rows = connection.execute(
            "SELECT name, at_ms, body FROM events WHERE name IN ('StartWorker', 'WorkerReady') ORDER BY id"
        ).fetchall()
    began: dict[tuple[str, int], float] = {}
    for name, at_ms, body in rows:
        told = msgspec.json.decode(body)
        worker = (told["slot"], told["incarnation"])
        if name == "StartWorker":
            began[worker] = at_ms
        elif worker in began:
            yield (at_ms - began.pop(worker)) / 1e3
