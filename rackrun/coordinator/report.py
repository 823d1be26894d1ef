"""What a journal tells afterwards: recoveries stage by stage, where the time went, and whether a sample was lost or doubled.

Reads the file only; the job may still run. Formats: `rackrun.coordinator.journal`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from rackrun.coordinator.eras import Eras
from rackrun.coordinator.fillers import FillerUse, filler_uses
from rackrun.coordinator.reading import open_journal, resume_of
from rackrun.coordinator.recoveries import Recovery
from rackrun.coordinator.sharing import mesh_of
from rackrun.core.commands import Plan
from rackrun.core.dealing import sharing
from rackrun.core.ids import Position

__all__ = ["Goodput", "LedgerCheck", "OwnTime", "Report", "Stage", "read_goodput", "read_report"]

_STAGES = (
    ("break", "fault_ms", "break_ms"),
    ("park", "break_ms", "parked_ms"),
    ("plan", "parked_ms", "plan_ms"),
    ("resume", "plan_ms", "resumed_ms"),
    ("first commit", "resumed_ms", "committed_ms"),
)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    from_ms: float
    ms: float


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    line: str
    recovery: Recovery
    seconds: float | None
    """From the fault until every rank computed again."""
    stages: tuple[Stage, ...]


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """ETTR: effective training time ratio, productive time over wall time (the Llama 3 and Revisiting Reliability papers)."""

    wall_s: float
    """From the coordinator's start to the job's end, or to the last thing in the journal."""
    productive_s: float
    """Each committed unit counted once, at the time an undisturbed one takes."""
    startup_s: float
    """Until the first generation was resumed."""
    recovery_s: float
    """From each fault until all ranks computed again."""
    redone_s: float
    """Computed again: broken steps, and those since a rollback."""
    other_s: float
    """The script's own code between units, and what is in none of the above."""
    ettr: float
    ettr_since_first_step: float


class LedgerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Every sample counted once. Empty lists are good news."""

    units: int
    samples: int
    distinct: int
    """Different sample ids, where ids were kept."""
    doubled: tuple[str, ...] = ()
    """A sample id twice within one committed unit, and not by ranks that share their samples."""
    differing: tuple[str, ...] = ()
    """A unit that was computed again, on other samples than before; or ranks that share their samples, and had others."""
    missing: tuple[str, ...] = ()
    """A rank of the world whose row of a committed unit is not there."""
    rows_lost: int = 0
    """Rows that the journal could not take."""

    @property
    def ok(self) -> bool:
        return not (self.doubled or self.differing or self.missing or self.rows_lost)


class OwnTime(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's own part of a step: what it did not wait for others."""

    rank: int
    seconds: float
    """The median over all steps of which it is known."""
    waits: float
    """The share of those steps that it waited."""


class NoticeReport(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: int
    text: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    exit_code: int | None
    because: str
    steps: int
    steps_redone: int
    generations: int
    recoveries: tuple[RecoveryReport, ...]
    notices: tuple[NoticeReport, ...]
    """What was known of the hardware, and what was decided about it."""
    goodput: Goodput
    ledger: LedgerCheck
    fillers: tuple[FillerUse, ...] = ()
    """What ran beside spares while they waited, by slot."""
    own_times: tuple[OwnTime, ...] = ()
    """Of each rank, whoever held it."""


class _Unit(msgspec.Struct, frozen=True):
    at: Position
    rank: int
    generation: int
    attempt: int
    committed_ms: float
    seconds: float
    own_s: float


def read_report(path: Path) -> Report:
    """Raises UsageError when ``path`` is not a journal that this version can read."""
    with open_journal(path) as (connection, meta):
        return _report(connection, meta)


def read_goodput(path: Path) -> Goodput | None:
    """Where the time went, alone: of millions of units it takes seconds, and little memory. None: no unit was reported. Raises UsageError."""
    with open_journal(path) as (connection, meta):
        slowest = _slowest(connection)
        if not slowest:
            return None
        newest = "SELECT max(max(at_ms), coalesce((SELECT max(committed_at_ms) FROM units), 0)) FROM events"
        last_ms = connection.execute(newest).fetchone()[0] or 0
        ended_ms = float(meta.get("ended_ms") or last_ms)
        return _goodput(slowest, _recovery_s(connection), _redone(connection), ended_ms, _first_resume_ms(connection))


def _report(connection: sqlite3.Connection, meta: dict[str, str]) -> Report:
    plans: dict[int, Plan] = {
        (resume := resume_of(body)).plan.generation: resume.plan
        for (body,) in connection.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
    }
    recoveries = _recoveries(connection)
    units = [
        _Unit(Position(step, phase), *rest)
        for step, phase, *rest in connection.execute(
            "SELECT step, phase, rank, generation, attempt, committed_at_ms, seconds, own_s FROM units ORDER BY step, phase, rank"
        )
    ]
    last_event_ms = connection.execute("SELECT max(at_ms) FROM events").fetchone()[0] or 0
    ended_ms = float(meta.get("ended_ms") or max([last_event_ms, *(unit.committed_ms for unit in units)]))
    redone = _redone(connection)
    exit_code = meta.get("exit_code")
    return Report(
        run_id=meta.get("run_id", ""),
        exit_code=int(exit_code) if exit_code else None,
        because=meta.get("because", ""),
        steps=len({unit.at.step for unit in units if unit.at.phase == 0}),
        steps_redone=len([at for at in redone if at.phase == 0]),
        generations=len(plans),
        recoveries=tuple(
            RecoveryReport(line=one.line(), recovery=one, seconds=one.seconds, stages=_stages(one))
            for one in recoveries
        ),
        notices=tuple(
            NoticeReport(at_ms=at_ms, text=msgspec.json.decode(body)["text"])
            for at_ms, body in connection.execute(
                "SELECT at_ms, body FROM events WHERE kind = 'command' AND name IN ('Notice', 'Answer') ORDER BY id"
            )
        ),
        goodput=_goodput(_slowest(connection), _recovery_s(connection), redone, ended_ms, _first_resume_ms(connection)),
        ledger=_check_ledger(connection, units, plans, int(meta.get("rows_lost", 0))),
        fillers=filler_uses(connection),
        own_times=_own_times(units),
    )


def _recoveries(connection: sqlite3.Connection) -> list[Recovery]:
    return [
        msgspec.json.decode(body, type=Recovery)
        for (body,) in connection.execute("SELECT body FROM recoveries ORDER BY generation")
    ]


def _first_resume_ms(connection: sqlite3.Connection) -> int | None:
    found: int | None = connection.execute("SELECT min(at_ms) FROM generations WHERE stage = 'resume'").fetchone()[0]
    return found


def _stages(recovery: Recovery) -> tuple[Stage, ...]:
    """Consecutive; a stage that was skipped (nobody to break, nobody to park) takes no time."""
    stages = []
    reached = recovery.fault_ms
    for name, _, end in _STAGES:
        at: float | None = getattr(recovery, end)
        if at is not None:
            stages.append(Stage(name=name, from_ms=reached - recovery.fault_ms, ms=max(0.0, at - reached)))
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
    """Of each unit: how long the slowest rank took, in seconds."""
    return {
        Position(step, phase): max(seconds or 0.0, 0.0)
        for step, phase, seconds in connection.execute(
            "SELECT step, phase, max(seconds) FROM units GROUP BY step, phase ORDER BY step, phase"
        )
    }


def _redone(connection: sqlite3.Connection) -> dict[Position, int]:
    """How many times each unit was computed in vain: broken attempts, and commits that a rollback took back."""
    of_a_rank = (
        "SELECT step, phase, max(attempt) AS attempts, count(*) AS generations FROM units GROUP BY step, phase, rank"
    )
    query = f"SELECT step, phase, max(attempts, generations - 1) AS vain FROM ({of_a_rank}) WHERE vain > 0"  # noqa: S608 - no input in it
    found: dict[Position, int] = {}
    for step, phase, vain in connection.execute(query):
        found[Position(step, phase)] = max(found.get(Position(step, phase), 0), vain)
    return found


def _recovery_s(connection: sqlite3.Connection) -> float:
    """From each fault until all computed again. A coordinator that stood still hears of that late, together with what they have computed
    meanwhile: they began no later than it took them to compute that."""
    began = (
        "committed_at_ms - 1000 * sum(max(coalesce(seconds, 0), 0)) OVER (PARTITION BY generation ORDER BY step, phase)"
    )
    query = f"SELECT generation, min(began) FROM (SELECT generation, {began} AS began FROM units WHERE rank = 0) GROUP BY generation"  # noqa: S608 - no input in it
    computing: dict[int, float] = dict(connection.execute(query))
    known = [
        (one, one.resumed_ms) for one in _recoveries(connection) if one.resumed_ms is not None and not one.overtaken
    ]
    ends_ms = [(one.fault_ms, min(resumed_ms, computing.get(one.generation, resumed_ms))) for one, resumed_ms in known]
    return sum(max(end_ms - fault_ms, 0.0) / 1e3 for fault_ms, end_ms in ends_ms)


def _goodput(
    slowest: dict[Position, float],
    recovery_s: float,
    redone: dict[Position, int],
    ended_ms: float,
    first_resume_ms: int | None,
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
    redone_s = sum(count * usual.get(at.phase, 0.0) for at, count in redone.items())
    startup_s = (first_resume_ms if first_resume_ms is not None else ended_ms) / 1e3
    since_s = wall_s - startup_s
    return Goodput(
        wall_s=wall_s,
        productive_s=productive_s,
        startup_s=startup_s,
        recovery_s=recovery_s,
        redone_s=redone_s,
        other_s=max(0.0, wall_s - productive_s - startup_s - recovery_s - redone_s),
        ettr=productive_s / wall_s if wall_s > 0 else 0.0,
        ettr_since_first_step=productive_s / since_s if since_s > 0 else 0.0,
    )


# -- nothing lost, nothing twice -------------------------------------------------------------------------------------
def _check_ledger(
    connection: sqlite3.Connection, units: list[_Unit], plans: dict[int, Plan], rows_lost: int
) -> LedgerCheck:
    """An *execution* of a unit is one time that it was committed: rollbacks separate them, and within one each sample
    stands once. Some ranks may report it in the generation in which its gate passed, others in the next."""
    eras = Eras(plans)
    era = eras.of
    expected: dict[tuple[Position, int], dict[int, int]] = defaultdict(dict)  # execution -> rank -> generation
    for unit in units:
        if eras.counts(unit.at, unit.generation):
            expected[unit.at, era(unit.generation)][unit.rank] = unit.generation
    missing = []
    last = max((unit.at for unit in units), default=None)
    for (at, _), ranks in sorted(expected.items()):
        plan = plans.get(min(ranks.values()))
        absent = [rank for rank in range(plan.world_size) if rank not in ranks] if plan else []
        if absent and at != last:  # of the last unit some rows may still be on their way
            missing.append(f"{_name(at)}: no row of rank {', '.join(map(str, absent))}")

    samples: dict[tuple[Position, int], dict[int, tuple[int, bytes, bytes | None]]] = defaultdict(dict)
    for step, phase, rank, generation, count, digest, ids in connection.execute(
        "SELECT step, phase, rank, generation, count, digest, ids FROM ledger ORDER BY step, phase, generation"
    ):
        if eras.counts(Position(step, phase), generation):
            samples[Position(step, phase), era(generation)][rank] = (count, digest, ids)
    doubled: list[str] = []
    differing: list[str] = []
    seen: Counter[int] = Counter()
    first_content: dict[Position, tuple[tuple[int, ...], tuple[bytes, ...]]] = {}
    total = 0
    axes = mesh_of(connection)
    for (at, in_era), rows in sorted(samples.items()):
        plan = plans.get(min(expected[at, in_era].values(), default=0))
        for group in sharing(axes, plan.world_size) if plan else ():
            told = {rank: rows[rank][:2] for rank in group if rank in rows}
            if len(set(told.values())) > 1:
                differing.append(f"{_name(at)}: ranks {', '.join(map(str, told))} share their samples, and had others")
            for rank in list(told)[1:]:
                del rows[rank]  # counted once
        blobs = [ids for _, _, ids in rows.values() if ids is not None]
        delivered = np.sort(np.frombuffer(b"".join(blobs), dtype="<i8"))
        twice = np.unique(delivered[1:][delivered[1:] == delivered[:-1]])
        if len(twice):
            doubled.append(f"{_name(at)}: {_some(twice.tolist())}")
        dealt: tuple[int, ...] = ()  # where only digests are kept: they tell nothing when ranks had other shares
        content: tuple[bytes, ...] = (delivered.tobytes(),)
        if len(blobs) < len(rows):
            dealt, content = zip(*(rows[rank][:2] for rank in sorted(rows)), strict=True)
        known = first_content.get(at)
        if known is None:
            first_content[at] = dealt, content
            total += sum(count for count, _, _ in rows.values())
            seen.update(delivered.tolist())
        elif (known[0] == dealt and known[1] != content) or sum(known[0]) != sum(dealt):
            differing.append(f"{_name(at)}: computed again on other samples")
    return LedgerCheck(
        units=len({at for at, _ in expected}),
        samples=total,
        distinct=len(seen),
        doubled=tuple(doubled),
        differing=tuple(differing),
        missing=tuple(missing),
        rows_lost=rows_lost,
    )


def _name(at: Position) -> str:
    return f"step {at.step}" if at.phase == 0 else f"step {at.step} phase {at.phase}"


def _some(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
