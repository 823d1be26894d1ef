"""Where the time of a job went, from its journal: productive, starting, recovering, done again, held.

It only reads the file, and the job may still run. Formats: `rackrun.coordinator.journal.journal_writer`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import msgspec

from rackrun.coordinator.journal.journal_reader import open_journal
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.protocol.ids import Position
from rackrun.protocol.policy_types import Rung

__all__ = [
    "Goodput",
    "done_again",
    "goodput_of",
    "read_goodput",
    "recoveries_in",
    "redone_units",
    "see_one_moment",
    "slowest_ranks",
]


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


def read_goodput(path: Path) -> Goodput | None:
    """Read only where the time went; None: no unit was reported. Raises UsageError.

    For millions of units it takes seconds and little memory.
    """
    with open_journal(path) as (connection, meta):
        see_one_moment(connection)
        slowest = slowest_ranks(connection)
        if not slowest:
            return None
        newest = "SELECT max(max(at_ms), coalesce((SELECT max(committed_at_ms) FROM units), 0)) FROM events"
        last_ms = connection.execute(newest).fetchone()[0] or 0
        ended_ms = float(meta.get("ended_ms") or last_ms)
        return goodput_of(connection, slowest, redone_units(connection), ended_ms)


def see_one_moment(connection: sqlite3.Connection) -> None:
    """Make all later reads see one moment, although the job goes on. Without a write-ahead log this is not done,
    because it would keep the job from writing."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("BEGIN")


def recoveries_in(connection: sqlite3.Connection) -> list[RecoveryRecord]:
    """Return all recoveries in the journal, by generation."""
    return [
        msgspec.json.decode(body, type=RecoveryRecord)
        for (body,) in connection.execute("SELECT body FROM recoveries ORDER BY generation")
    ]


def _first_resume_ms(connection: sqlite3.Connection) -> int | None:
    found: int | None = connection.execute("SELECT min(at_ms) FROM generations WHERE stage = 'resume'").fetchone()[0]
    return found


def slowest_ranks(connection: sqlite3.Connection) -> dict[Position, float]:
    """Return for each unit the seconds of its slowest rank."""
    return {
        Position(step, phase): max(seconds or 0.0, 0.0)
        for step, phase, seconds in connection.execute(
            "SELECT step, phase, max(seconds) FROM (SELECT step, phase, seconds FROM units UNION ALL SELECT step, phase, seconds FROM folded) "
            "GROUP BY step, phase ORDER BY step, phase"
        )
    }


def redone_units(connection: sqlite3.Connection) -> dict[Position, int]:
    """Return how many times each unit was computed in vain: broken attempts, and commits that a rollback or a restart
    took back."""
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
    for at, times in _named_by_recoveries(connection).items():
        found[at] = max(found.get(at, 0), times)
    return found


def _named_by_recoveries(connection: sqlite3.Connection) -> Counter[Position]:
    """Return how many recoveries had each step done again. After a rollback and after a restart, only they know which
    step was broken: nobody had committed it, and its attempts are counted anew."""
    return Counter(Position(step) for done, _ in done_again(connection) for step in done)


def done_again(connection: sqlite3.Connection) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return for each recovery, by generation, the steps that were done again after it, and those that were to be and
    were not, because the job has ended or is not there yet.

    After a recovery that another failure has overtaken, nothing was computed: its steps count for the one that follows.
    """
    last_generation = (
        "SELECT max(generation) FROM (SELECT generation FROM units WHERE step = ?1 AND phase = 0 "
        "UNION ALL SELECT generation FROM folded WHERE step = ?1 AND phase = 0)"
    )
    found, due = list[tuple[int, bool, set[int], set[int]]](), set[int]()
    for one in recoveries_in(connection):
        due |= {*one.redone}
        done, undone = set[int](), set[int]()
        found.append((one.generation, one.overtaken, done, undone))
        for step in () if one.overtaken else due:
            (generation,) = connection.execute(last_generation, (step,)).fetchone()
            if generation is not None and generation >= one.generation:
                done.add(step)
            elif one.rollback is None and one.kind != "restart" and step in one.redone:
                # It is named because a rank has told of it, when this recovery had begun: another one had it done again.
                earlier = [steps for at, overtaken, steps, _ in found if at <= (generation or 0) and not overtaken]
                (earlier or [done])[-1].add(step)
            else:
                undone.add(step)
        if not one.overtaken:
            due.clear()
    return [(tuple(sorted(done)), tuple(sorted(undone))) for _, _, done, undone in found]


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
        (one, one.resumed_ms) for one in recoveries_in(connection) if one.resumed_ms is not None and not one.overtaken
    ]
    ends_ms = [(one.fault_ms, min(resumed_ms, computing.get(one.generation, resumed_ms))) for one, resumed_ms in known]
    held_ms = sum(
        max(min(end, end_ms) - max(begin, fault_ms), 0.0) for fault_ms, end_ms in ends_ms for begin, end in holds
    )
    return max(sum(max(end_ms - fault_ms, 0.0) for fault_ms, end_ms in ends_ms) - held_ms, 0.0) / 1e3


def goodput_of(
    connection: sqlite3.Connection, slowest: dict[Position, float], redone: dict[Position, int], ended_ms: float
) -> Goodput:
    """Return where the time went. ``slowest``, ``redone``: from `slowest_ranks` and `redone_units`. ``ended_ms``: when
    the job ended, or the last entry was made."""
    holds = _holds(connection, ended_ms)
    recovery_s, first_resume_ms = _recovery_s(connection, holds), _first_resume_ms(connection)
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
