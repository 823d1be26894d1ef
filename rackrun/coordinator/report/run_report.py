"""Report from a journal: recoveries by stage, where the time went, and whether a sample was lost or counted twice.

It only reads the file, and the job may still run. Formats: `rackrun.coordinator.journal.journal_writer`.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec

from rackrun.coordinator.journal.command_causes import CommandCause, SentTogether, commands_of, recovery_commands
from rackrun.coordinator.journal.folding import folded_units
from rackrun.coordinator.journal.job_mesh import mesh_of
from rackrun.coordinator.journal.journal_reader import open_journal, resume_of
from rackrun.coordinator.journal.ledger_check import FINDINGS, LedgerCheck, LedgerRow, check_ledger, samples_in
from rackrun.coordinator.observe.filler_usage import FillerUse, filler_uses
from rackrun.coordinator.observe.recoveries import RecoveryRecord, named_steps
from rackrun.coordinator.report.goodput import (
    Goodput,
    done_again,
    goodput_of,
    recoveries_in,
    redone_units,
    see_one_moment,
    slowest_ranks,
)
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position
from rackrun.protocol.policy_types import Rung

__all__ = ["LedgerCheck", "OwnTime", "Report", "RecoveryStage", "read_report"]

_STAGES = (
    ("break", "fault_ms", "break_ms"),
    ("park", "break_ms", "parked_ms"),
    ("plan", "parked_ms", "plan_ms"),
    ("resume", "plan_ms", "resumed_ms"),
    ("first commit", "resumed_ms", "committed_ms"),
)

_HOLD_OF_OLD = "all ranks wait in a hold"
"""How a notice about a hold begins in a journal that is older than `Notice.of_hold`."""


class RecoveryStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a recovery: its begin after the fault and its length, in milliseconds."""

    name: str
    from_ms: float
    ms: float


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery, with its stages."""

    line: str
    recovery: RecoveryRecord
    seconds: float | None
    """Seconds from the fault until every rank computed again."""
    stages: tuple[RecoveryStage, ...]
    commands: tuple[SentTogether, ...] = ()
    """The commands that led to the new generation, each with its cause."""


class OwnTime(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's own time in a step: the time in which it did not wait for others."""

    rank: int
    seconds: float
    """Median over all steps for which it is known."""
    waits: float
    """Fraction of those steps' time in which the rank waited."""


class NoticeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One notice, its time and its cause."""

    at_ms: int
    text: str
    cause: CommandCause = CommandCause()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a journal says about a job."""

    run_id: str
    exit_code: int | None
    because: str
    stop: SentTogether | None = None
    """The command that ended the job, with its cause; None: there was none yet."""
    steps: int
    steps_redone: int
    """How many of them were computed more than once: broken steps, and steps since a rollback or since a restart's
    checkpoint."""
    generations: int
    recoveries: tuple[RecoveryReport, ...]
    notices: tuple[NoticeReport, ...]
    """What was known about the hardware, and what was decided about it."""
    goodput: Goodput
    ledger: LedgerCheck
    fillers: tuple[FillerUse, ...] = ()
    """Use of fillers beside spares, by slot."""
    steps_rescaled: int = 0
    """How many steps were done again because a gradient had no scale yet, or had outgrown it (``reduction="exact"``)."""
    waits: str = ""
    """Why all ranks wait, as ``core.waits`` of ``rackctl status --json`` says it, for the latest decision; "": they do
    not, or the job has ended."""
    hold: str = ""
    """What is missing in a hold and what ends it, as the latest notice says; "": all ranks do not wait in one. ``core.hold``
    of ``rackctl status --json`` is the same, for now."""
    own_times: tuple[OwnTime, ...] = ()
    """Own times by rank, whichever worker held the rank."""


class _Unit(msgspec.Struct, frozen=True):
    at: Position
    rank: int
    generation: int
    attempt: int
    committed_ms: float
    seconds: float
    own_s: float


def read_report(path: Path) -> Report:
    """Read the report from a journal. Raises UsageError if ``path`` is not a journal that this version can read."""
    with open_journal(path) as (connection, meta):
        see_one_moment(connection)
        return _report(connection, meta)


def _report(connection: sqlite3.Connection, meta: dict[str, str]) -> Report:
    plans: dict[int, GenerationPlan] = {
        (resume := resume_of(body)).plan.generation: resume.plan
        for (body,) in connection.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
    }
    recoveries, sent = recoveries_in(connection), recovery_commands(connection)
    units = [
        _Unit(Position(step, phase), *rest)
        for step, phase, *rest in connection.execute(
            "SELECT step, phase, rank, generation, attempt, committed_at_ms, seconds, own_s FROM units ORDER BY step, phase, rank"
        )
    ]
    last_event_ms = connection.execute("SELECT max(at_ms) FROM events").fetchone()[0] or 0
    ended_ms = float(meta.get("ended_ms") or max([last_event_ms, *(unit.committed_ms for unit in units)]))
    redone, slowest = redone_units(connection), slowest_ranks(connection)
    exit_code = meta.get("exit_code")
    waits, hold = _waits(connection) if not exit_code else ("", "")
    return Report(
        run_id=meta.get("run_id", ""),
        exit_code=int(exit_code) if exit_code else None,
        because=meta.get("because", ""),
        stop=next(
            (
                SentTogether(at_ms=one.at_ms, commands={one.name: 1}, cause=one.cause)
                for one in commands_of(connection, "StopJob")
            ),
            None,
        ),
        steps=len([at for at in slowest if at.phase == 0]),
        steps_redone=len([at for at in redone if at.phase == 0]),
        steps_rescaled=int(meta.get("steps_rescaled", 0)),
        generations=len(plans),
        recoveries=tuple(
            _recovery(one, steps, sent.get(one.generation, ()), ended=bool(exit_code))
            for one, steps in zip(recoveries, done_again(connection), strict=True)
        ),
        notices=tuple(
            NoticeReport(at_ms=one.at_ms, text=msgspec.json.decode(one.body)["text"], cause=one.cause)
            for one in commands_of(connection, "Notice", "Answer")
        ),
        goodput=goodput_of(connection, slowest, redone, ended_ms),
        ledger=_check_ledger(connection, plans, int(meta.get("rows_lost", 0))),
        fillers=filler_uses(connection),
        waits=waits,
        hold=hold,
        own_times=_own_times(units),
    )


def _recovery(
    one: RecoveryRecord,
    steps: tuple[tuple[int, ...], tuple[int, ...]],
    commands: tuple[SentTogether, ...],
    *,
    ended: bool,
) -> RecoveryReport:
    """Return the report of one recovery. ``steps``: its item of `done_again`. ``ended``: whether the job has ended."""
    done, undone = steps
    one = msgspec.structs.replace(one, redone=done)
    line = one.line()
    if undone:
        line += f", {named_steps(undone)} not done again" if ended else f", {named_steps(undone)} not yet done again"
    return RecoveryReport(line=line, recovery=one, seconds=one.seconds, stages=_stages(one), commands=commands)


def _waits(connection: sqlite3.Connection) -> tuple[str, str]:
    """Return why all ranks wait, and the latest notice if it is a hold. Two empty strings: the latest decision was not to
    wait, or another generation has followed."""
    if not (decided := list(commands_of(connection, "Decided"))):
        return "", ""
    body = msgspec.json.decode(decided[-1].body)
    failure, decision = body["failure"], body["decision"]
    holds = decision["rung"] == Rung.HOLD.value
    query = "SELECT max(CASE stage WHEN 'break' THEN generation - 1 ELSE generation END) FROM generations"
    newest = connection.execute(query).fetchone()[0] or 0
    if newest >= body["generation"] or not (
        holds or decision["rung"] == Rung.WAIT.value or decision.get("meanwhile") == "wait"
    ):
        return "", ""
    notices = [msgspec.json.decode(one.body) for one in commands_of(connection, "Notice")] if holds else []
    of_holds = [one["text"] for one in notices if one.get("of_hold", one["text"].startswith(_HOLD_OF_OLD))]
    return f"{failure['what']}; {decision['reason']}", of_holds[-1] if of_holds else ""


def _stages(recovery: RecoveryRecord) -> tuple[RecoveryStage, ...]:
    """Return consecutive stages. A skipped stage (no member to break, or none to park) takes no time. A hold is a stage
    of its own, in front of the plan."""
    stages = []
    reached = recovery.fault_ms
    for name, _, end in _STAGES:
        at: float | None = getattr(recovery, end)
        if name == "plan" and recovery.held_ms:
            stages.append(RecoveryStage(name="hold", from_ms=reached - recovery.fault_ms, ms=recovery.held_ms))
            reached += recovery.held_ms
        if at is not None:
            stages.append(RecoveryStage(name=name, from_ms=reached - recovery.fault_ms, ms=max(0.0, at - reached)))
            reached = max(reached, at)
    return tuple(stages)


def _own_times(units: list[_Unit]) -> tuple[OwnTime, ...]:
    known: dict[int, list[_Unit]] = defaultdict(list)
    for unit in units:
        if unit.at.phase == 0 and unit.own_s > 0:
            known[unit.rank].append(unit)
    return tuple(
        OwnTime(
            rank=rank,
            seconds=median(unit.own_s for unit in found),
            waits=max(0.0, 1 - sum(unit.own_s for unit in found) / sum(unit.seconds for unit in found)),
        )
        for rank, found in sorted(known.items())
    )


# -- nothing lost, nothing twice -------------------------------------------------------------------------------------
def _check_ledger(connection: sqlite3.Connection, plans: dict[int, GenerationPlan], rows_lost: int) -> LedgerCheck:
    units = (
        (Position(step, phase), rank, generation, samples_in(gate))
        for step, phase, rank, generation, gate in connection.execute(
            "SELECT step, phase, rank, generation, gate FROM units"
        )
    )
    rows = (
        LedgerRow(Position(step, phase), *rest)
        for step, phase, *rest in connection.execute(
            "SELECT step, phase, rank, generation, count, digest, ids FROM ledger ORDER BY step, phase, generation"
        )
    )
    check = check_ledger(units, rows, plans, mesh_of(connection), rows_lost, folded_units(connection))
    before: dict[str, list[str]] = defaultdict(list)
    for kind, what in connection.execute("SELECT kind, what FROM findings ORDER BY rowid"):
        before[kind].append(what)
    return msgspec.structs.replace(check, **{kind: (*before[kind], *getattr(check, kind)) for kind in FINDINGS})
