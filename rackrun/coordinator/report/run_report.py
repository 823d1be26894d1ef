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
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position
from rackrun.protocol.policy_types import Rung

__all__ = ["Goodput", "LedgerCheck", "OwnTime", "Report", "RecoveryStage", "read_goodput", "read_report"]

_STAGES = (
    ("break", "fault_ms", "break_ms"),
    ("park", "break_ms", "parked_ms"),
    ("plan", "parked_ms", "plan_ms"),
    ("resume", "plan_ms", "resumed_ms"),
    ("first commit", "resumed_ms", "committed_ms"),
)


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


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """ETTR: effective training time ratio, productive time over wall time (the Llama 3 and Revisiting Reliability papers)."""

    wall_s: float
    """Seconds from the coordinator's start to the job's end, or to the last entry in the journal."""
    productive_s: float
    """Time of committed units, each counted once with the time of an undisturbed one."""
    startup_s: float
    """Time until the first generation was resumed."""
    recovery_s: float
    """Time from each fault until all ranks computed again."""
    redone_s: float
    """Time of work that was computed again: broken steps, and steps since a rollback."""
    other_s: float
    """All other time, such as the script's own code between units."""
    ettr: float
    ettr_since_first_step: float
    hold_s: float = 0.0
    """Time that all ranks waited in a hold. It is not part of ``recovery_s``."""


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
        _see_one_moment(connection)
        return _report(connection, meta)


def read_goodput(path: Path) -> Goodput | None:
    """Read only where the time went; None: no unit was reported. Raises UsageError.

    For millions of units it takes seconds and little memory.
    """
    with open_journal(path) as (connection, meta):
        _see_one_moment(connection)
        slowest = _slowest(connection)
        if not slowest:
            return None
        newest = "SELECT max(max(at_ms), coalesce((SELECT max(committed_at_ms) FROM units), 0)) FROM events"
        last_ms = connection.execute(newest).fetchone()[0] or 0
        ended_ms = float(meta.get("ended_ms") or last_ms)
        holds = _holds(connection, ended_ms)
        recovery_s, first_ms = _recovery_s(connection, holds), _first_resume_ms(connection)
        return _goodput(slowest, recovery_s, _redone(connection), ended_ms, first_ms, holds)


def _see_one_moment(connection: sqlite3.Connection) -> None:
    """Make all later reads see one moment, although the job goes on. Without a write-ahead log this is not done,
    because it would keep the job from writing."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("BEGIN")


def _report(connection: sqlite3.Connection, meta: dict[str, str]) -> Report:
    plans: dict[int, GenerationPlan] = {
        (resume := resume_of(body)).plan.generation: resume.plan
        for (body,) in connection.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
    }
    recoveries, sent = _recoveries(connection), recovery_commands(connection)
    units = [
        _Unit(Position(step, phase), *rest)
        for step, phase, *rest in connection.execute(
            "SELECT step, phase, rank, generation, attempt, committed_at_ms, seconds, own_s FROM units ORDER BY step, phase, rank"
        )
    ]
    last_event_ms = connection.execute("SELECT max(at_ms) FROM events").fetchone()[0] or 0
    ended_ms = float(meta.get("ended_ms") or max([last_event_ms, *(unit.committed_ms for unit in units)]))
    redone, slowest, holds = _redone(connection), _slowest(connection), _holds(connection, ended_ms)
    exit_code = meta.get("exit_code")
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
            RecoveryReport(
                line=one.line(),
                recovery=one,
                seconds=one.seconds,
                stages=_stages(one),
                commands=sent.get(one.generation, ()),
            )
            for one in recoveries
        ),
        notices=tuple(
            NoticeReport(at_ms=one.at_ms, text=msgspec.json.decode(one.body)["text"], cause=one.cause)
            for one in commands_of(connection, "Notice", "Answer")
        ),
        goodput=_goodput(
            slowest, _recovery_s(connection, holds), redone, ended_ms, _first_resume_ms(connection), holds
        ),
        ledger=_check_ledger(connection, plans, int(meta.get("rows_lost", 0))),
        fillers=filler_uses(connection),
        own_times=_own_times(units),
    )


def _recoveries(connection: sqlite3.Connection) -> list[RecoveryRecord]:
    return [
        msgspec.json.decode(body, type=RecoveryRecord)
        for (body,) in connection.execute("SELECT body FROM recoveries ORDER BY generation")
    ]


def _first_resume_ms(connection: sqlite3.Connection) -> int | None:
    found: int | None = connection.execute("SELECT min(at_ms) FROM generations WHERE stage = 'resume'").fetchone()[0]
    return found


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


# -- where the time went ---------------------------------------------------------------------------------------------
def _slowest(connection: sqlite3.Connection) -> dict[Position, float]:
    """Return for each unit the seconds of its slowest rank."""
    return {
        Position(step, phase): max(seconds or 0.0, 0.0)
        for step, phase, seconds in connection.execute(
            "SELECT step, phase, max(seconds) FROM (SELECT step, phase, seconds FROM units UNION ALL SELECT step, phase, seconds FROM folded) "
            "GROUP BY step, phase ORDER BY step, phase"
        )
    }


def _redone(connection: sqlite3.Connection) -> dict[Position, int]:
    """Return how many times each unit was computed in vain: broken attempts, and commits that a rollback took back."""
    of_a_rank = (
        "SELECT step, phase, max(attempt) AS attempts, count(*) AS generations FROM units GROUP BY step, phase, rank"
    )
    query = f"SELECT step, phase, max(attempts, generations - 1) AS vain FROM ({of_a_rank}) WHERE vain > 0"  # noqa: S608 - no input in it
    found: dict[Position, int] = {}
    for step, phase, vain in connection.execute(query):
        found[Position(step, phase)] = max(found.get(Position(step, phase), 0), vain)
    again = "EXISTS (SELECT 1 FROM units WHERE (units.step, units.phase) = (folded.step, folded.phase))"
    query = f"SELECT step, phase, vain + {again} AS all_vain FROM folded WHERE all_vain > 0"  # noqa: S608 - no input in it
    for step, phase, vain in connection.execute(query):
        found[Position(step, phase)] = found.get(Position(step, phase), 0) + vain
    return found


def _holds(connection: sqlite3.Connection, ended_ms: float) -> list[tuple[float, float]]:
    """Return begin and end of each hold, in milliseconds. It ends with the next decision, or with the job."""
    decided = connection.execute(
        "SELECT at_ms, body FROM events WHERE kind = 'command' AND name = 'Decided' ORDER BY id"
    ).fetchall()
    ends = [at_ms for at_ms, _ in decided[1:]] + [ended_ms]
    rungs = [msgspec.json.decode(body)["decision"]["rung"] for _, body in decided]
    rows = zip(decided, rungs, ends, strict=False)
    return [(at_ms, max(at_ms, end)) for (at_ms, _), rung, end in rows if rung == Rung.HOLD.value]


def _recovery_s(connection: sqlite3.Connection, holds: list[tuple[float, float]]) -> float:
    """Return the total seconds from each fault until all computed again, without those of holds.

    A coordinator that stood still receives that report late, together with what the ranks have computed since. So they
    began at least as early as their computing time implies.
    """
    began = (
        "committed_at_ms - 1000 * sum(max(coalesce(seconds, 0), 0)) OVER (PARTITION BY generation ORDER BY step, phase)"
    )
    query = f"SELECT generation, min(began) FROM (SELECT generation, {began} AS began FROM units WHERE rank = 0) GROUP BY generation"  # noqa: S608 - no input in it
    computing: dict[int, float] = dict(connection.execute(query))
    known = [
        (one, one.resumed_ms) for one in _recoveries(connection) if one.resumed_ms is not None and not one.overtaken
    ]
    ends_ms = [(one.fault_ms, min(resumed_ms, computing.get(one.generation, resumed_ms))) for one, resumed_ms in known]
    held_ms = sum(
        max(min(end, end_ms) - max(begin, fault_ms), 0.0) for fault_ms, end_ms in ends_ms for begin, end in holds
    )
    return max(sum(max(end_ms - fault_ms, 0.0) for fault_ms, end_ms in ends_ms) - held_ms, 0.0) / 1e3


def _goodput(
    slowest: dict[Position, float],
    recovery_s: float,
    redone: dict[Position, int],
    ended_ms: float,
    first_resume_ms: int | None,
    holds: list[tuple[float, float]],
) -> Goodput:
    calm: dict[int, list[float]] = defaultdict(list)  # phase -> seconds of units that nothing disturbed
    for at, seconds in slowest.items():
        if at not in redone:
            calm[at.phase].append(seconds)
    usual = {phase: median(times) for phase, times in calm.items()}

    def worth(at: Position) -> float:
        return usual.get(at.phase, 0.0) if at in redone else slowest[at]

    wall_s = ended_ms / 1e3
    productive_s = sum(worth(at) for at in slowest)
    startup_s = (first_resume_ms if first_resume_ms is not None else ended_ms) / 1e3
    since_s = wall_s - startup_s
    hold_s = sum(end - begin for begin, end in holds) / 1e3
    estimated_s = sum(count * usual.get(at.phase, 0.0) for at, count in redone.items())
    redone_s = min(
        estimated_s, max(0.0, since_s - productive_s - recovery_s - hold_s)
    )  # steps may have become slower since
    return Goodput(
        wall_s=wall_s,
        productive_s=productive_s,
        startup_s=startup_s,
        recovery_s=recovery_s,
        redone_s=redone_s,
        other_s=max(0.0, wall_s - productive_s - startup_s - recovery_s - redone_s - hold_s),
        ettr=productive_s / wall_s if wall_s > 0 else 0.0,
        ettr_since_first_step=productive_s / since_s if since_s > 0 else 0.0,
        hold_s=hold_s,
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
