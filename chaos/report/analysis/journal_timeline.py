"""Read one job's journal on the clock of the harness, in seconds since the harness started the job.

Both clocks are the host's monotonic clock, so the journal's times are shifted exactly. Reports of agents and workers
are stamped when they arrive; commits travel in batches, and may be stamped 20 ms late.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from rackrun.chaos.evidence.run_evidence import gate_of
from rackrun.chaos.inprocess.restore_times import Restored, read_restores
from rackrun.coordinator.journal.command_causes import rule_column
from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.coordinator.journal.journal_reader import open_journal, resume_of
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.errors import UsageError
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Position

__all__ = [
    "Happened",
    "Life",
    "PlannedGeneration",
    "RankUnit",
    "JournalTimeline",
    "CommittedUnit",
    "read_recorded",
    "units_by_rank",
]

_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
SEEN = tuple(name for name, kind in _EVENTS.items() if kind.shows_fault != "no")
"""Events by which a job notices that something is wrong."""
ORDINARY = tuple(name for name in SEEN if _EVENTS[name].shows_fault == "perhaps")
"""Those of them that also happen without a fault."""
_SAID = ("Decided", "Notice", "Answer", "ResumeGeneration", "StopJob")


class Happened(NamedTuple):
    """An event or a command of the core."""

    id: int
    cause: int | None
    name: str
    at_s: float
    body: dict[str, Any]
    rule: str = ""
    """The rule that sent a command; "": it is an event, or an older journal does not say it."""

    @property
    def slot(self) -> str:
        return str(self.body.get("slot", ""))

    @property
    def tray(self) -> str:
        return str(self.body.get("tray", "")) or self.slot.partition("/")[0]

    @property
    def how(self) -> str:
        """The reason, in a few words."""
        try:
            return str(msgspec.convert(self.body, _EVENTS[self.name]).how)
        except (KeyError, msgspec.ValidationError):  # a command, or an event of an older journal
            return str(self.body.get("because", ""))


class PlannedGeneration(NamedTuple):
    """A generation, at the time when its plan was on disk."""

    at_s: float
    plan: GenerationPlan


class Life(NamedTuple):
    """The life of a worker, from the command to start it to its end."""

    slot: str
    incarnation: int
    began_s: float
    ended_s: float | None
    """The time of its end; None: it lived as long as the job."""
    how: str
    """How it ended; "": by itself, or with the job."""


class CommittedUnit(NamedTuple):
    """A step or a phase, as the world committed it in one generation."""

    step: int
    phase: int
    generation: int
    at_s: float
    """The time of the last rank's report."""
    attempt: int
    gate: bytes
    """See `rackrun.chaos.evidence.run_evidence.Gate`; b"": not known."""
    counts: bool
    """Whether the unit counts: no plan took it back before other ranks knew of it."""

    @property
    def loss(self) -> float | None:
        return gate_of(self.gate).loss if self.gate else None


class RankUnit(NamedTuple):
    """One rank's report of one unit."""

    rank: int
    step: int
    phase: int
    generation: int
    attempt: int
    at_s: float
    seconds: float


@dataclass
class JournalTimeline:
    """The recorded events of one run."""

    folder: Path
    zero_s: float = 0.0
    """The time at which the coordinator's clock was 0."""
    end_s: float = 0.0
    slots: dict[str, int] = field(default_factory=dict)
    """Tray -> the number of its slots."""
    hosts: dict[str, str] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    plans: list[PlannedGeneration] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    seen: list[Happened] = field(default_factory=list)
    said: list[Happened] = field(default_factory=list)
    units: list[CommittedUnit] = field(default_factory=list)
    """The units by step and phase, then by generation."""
    restores: dict[int, list[Restored]] = field(default_factory=dict)
    """The restores by generation."""

    def at_s(self, ms: float) -> float:
        """Return a time in the journal (ms) as seconds on the harness's clock."""
        return round(self.zero_s + ms / 1e3, 6)

    def losses(self) -> dict[tuple[int, int], bytes]:
        """Return (step, phase) -> the gate with which it was first committed."""
        found: dict[tuple[int, int], bytes] = {}
        for unit in self.units:
            if unit.counts and unit.gate:
                found.setdefault((unit.step, unit.phase), unit.gate)
        return found


def read_recorded(folder: Path, started_s: float | None) -> JournalTimeline:
    """Read the journal of a run.

    ``folder`` is that of a `rackrun.chaos.testbed.job_under_test.JobUnderTest`. ``started_s`` is the host's monotonic clock when
    it was started; if that is None, times are counted from the coordinator's beginning. Raises `UsageError` when there
    is no journal.
    """
    found = JournalTimeline(folder)
    with open_journal(folder / "run" / "journal.sqlite") as (journal, meta):
        began_s = float(meta.get("began_monotonic_s", 0.0))
        found.zero_s = began_s - started_s if started_s is not None and began_s else 0.0
        _read_events(journal, found)
        _read_units(journal, found)
        found.recoveries = [
            msgspec.json.decode(body, type=RecoveryRecord)
            for (body,) in journal.execute("SELECT body FROM recoveries ORDER BY generation")
        ]
        last_ms = journal.execute("SELECT max(at_ms) FROM events").fetchone()[0] or 0
        found.end_s = found.at_s(float(meta.get("ended_ms") or last_ms))
    shift_s = found.zero_s - began_s if began_s else 0.0
    for one in read_restores(folder / "inside"):
        moved = one._replace(began_s=one.began_s + shift_s, ended_s=one.ended_s + shift_s)
        found.restores.setdefault(one.generation, []).append(moved)
    return found


@contextmanager
def units_by_rank(recorded: JournalTimeline) -> Iterator[Iterator[RankUnit]]:
    """Provide all reports of commits, by rank and in the order of time.

    There may be millions: iterate over them once.
    """
    with open_journal(recorded.folder / "run" / "journal.sqlite") as (journal, _):
        rows = journal.execute(
            "SELECT rank, step, phase, generation, attempt, committed_at_ms, seconds FROM units "
            "ORDER BY rank, committed_at_ms, step, phase"
        )
        yield (
            RankUnit(rank, step, phase, generation, attempt, recorded.at_s(at_ms), seconds or 0.0)
            for rank, step, phase, generation, attempt, at_ms, seconds in rows
        )


def maybe_recorded(folder: Path, started_s: float | None) -> JournalTimeline | None:
    """Read the journal of a run, or return None if there is none: the job ended too early, or the folder was
    removed."""
    try:
        return read_recorded(folder, started_s)
    except UsageError:
        return None


def _read_events(journal: sqlite3.Connection, found: JournalTimeline) -> None:
    names = ("TrayJoined", "StartWorker", *SEEN, *_SAID)
    rows = journal.execute(
        f"SELECT id, cause, name, at_ms, body, {rule_column(journal)} FROM events WHERE name IN ({', '.join('?' * len(names))}) ORDER BY id",  # noqa: S608 - marks only
        names,
    )
    living: dict[str, Life] = {}
    for number, cause, name, at_ms, text, rule in rows:
        one = Happened(number, cause, name, found.at_s(at_ms), msgspec.json.decode(text), rule or "")
        match name:
            case "TrayJoined":
                found.slots[one.tray], found.hosts[one.tray] = int(one.body["slots"]), str(one.body["host"])
            case "StartWorker":
                _end(found, living, one.slot, one.at_s, "")
                living[one.slot] = Life(one.slot, int(one.body["incarnation"]), one.at_s, None, "")
            case "ResumeGeneration":
                found.said.append(one)
                found.plans.append(PlannedGeneration(one.at_s, resume_of(text).plan))
            case _ if name in _SAID:
                found.said.append(one)
            case _:
                found.seen.append(one)
        if name == "WorkerExited":
            life = living.get(one.slot)
            if life is not None and life.incarnation == one.body["incarnation"]:
                _end(found, living, one.slot, one.at_s, one.how)
        elif name == "TrayLost":
            for slot in [slot for slot in living if slot.partition("/")[0] == one.tray]:
                _end(found, living, slot, one.at_s, one.how)
    found.lives += living.values()


def _end(found: JournalTimeline, living: dict[str, Life], slot: str, at_s: float, why: str) -> None:
    life = living.pop(slot, None)
    if life is not None:
        found.lives.append(life._replace(ended_s=at_s, how=why))


def _read_units(journal: sqlite3.Connection, found: JournalTimeline) -> None:
    eras = RollbackEras({one.plan.generation: one.plan for one in found.plans}) if found.plans else None
    for step, phase, generation, at_ms, attempt, gate in journal.execute(
        "SELECT step, phase, generation, max(committed_at_ms), max(attempt), max(gate) FROM units "
        "GROUP BY step, phase, generation ORDER BY step, phase, generation"
    ):
        counts = eras is None or eras.counts(Position(step, phase), generation)
        agreed = bytes(gate[:24]) if gate and len(gate) >= 24 else b""
        found.units.append(CommittedUnit(step, phase, generation, found.at_s(at_ms), attempt, agreed, counts))
