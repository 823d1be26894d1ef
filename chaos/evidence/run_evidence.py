"""Collect what a run has left for the oracles: what it computed, by its journal and its ranks, and how it ended."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import struct
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rackrun.chaos.evidence.journal_replay import Replayed, replay
from rackrun.chaos.inprocess.state_recorder import EndState, StepState, read_end_states, read_step_states
from rackrun.chaos.plan.conductor import StrikeRecord
from rackrun.chaos.plan.definition import Plan
from rackrun.chaos.testbed.job_under_test import JobResult
from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.coordinator.journal.journal_reader import resume_of
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.report.goodput import Goodput
from rackrun.coordinator.report.run_report import read_report
from rackrun.errors import UsageError
from rackrun.launch.run.run_directory import Result, read_json
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position, step_of

__all__ = ["RunEvidence", "Gate", "Trace", "Verdict", "began_wall_s", "read_trace"]


class Gate(msgspec.Struct, frozen=True, array_like=True):
    """What the world agreed on when it committed a step or a phase, exactly."""

    loss: float
    samples: float
    digest: float
    """The digest of the samples' ids."""


@dataclass
class Trace:
    """What one run has computed and recorded."""

    gates: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(step, phase) -> its `Gate`, as bytes."""
    samples: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Step -> rank -> ids of the samples it counted. The last steps may lack a rank whose agent was lost."""
    axes: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the script's mesh; (): it has none."""
    contradictions: list[str] = field(default_factory=list)
    """Steps that were computed again with another result."""
    held: dict[str, str] = field(default_factory=dict)
    """Rank -> digest of all tracked state at its end."""
    witness: list[StepState] = field(default_factory=list)
    """The state of the ranks before every step, by step and rank, if the run went step by step."""
    ends: dict[int, EndState] = field(default_factory=dict)
    """Rank -> the untracked state that its script reached at its end."""
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    plans: list[GenerationPlan] = field(default_factory=list)
    """The plans of the generations, in the order in which they were written to disk."""
    result: Result | None = None
    """The launcher's ``result.json``."""
    began_wall_s: float | None = None
    """Unix time at which the coordinator's clock was 0; all ``*_ms`` are counted from there."""
    goodput: Goodput | None = None
    replayed: Replayed = field(default_factory=lambda: Replayed(unknown="there is no journal"))
    """The result of replaying its events."""

    unpersisted: tuple[str, ...] = ()
    """Breaks or resumes of a generation that were carried out and are not on disk."""
    snapshot_gap: int | None = None
    """The smallest distance in steps between two snapshots that one rank reported together; None if no rank reported
    two."""
    damaged: tuple[int, ...] = ()
    """Generations in which a snapshot was found damaged."""
    last_commit_ms: float | None = None
    """When the last rank reported the commit of the last unit, in ms on the coordinator's clock."""
    began_monotonic_s: float | None = None
    """The host's monotonic clock when the coordinator began."""
    exact: bool | None = None
    """Whether results are independent of the number of ranks (``reduction="exact"``); None if no rank has
    reported it."""

    @property
    def steps(self) -> int:
        """The number of different steps that were committed."""
        return len({step for step, phase in self.gates if not phase})

    @property
    def last_step(self) -> int | None:
        """The last committed step, or None."""
        return max((step for step, _ in self.gates), default=None)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The sizes of the world: (step, ranks) for each step from which on the number of ranks was another, by the
        plans."""
        found: list[tuple[int, int]] = []
        for plan in self.plans:
            begins = (plan.committed.step if plan.rollback is None else plan.rollback) + 1
            found = [one for one in found if one[0] < begins]
            if not found or found[-1][1] != plan.world_size:
                found.append((begins, plan.world_size))
        return found

    @property
    def resized(self) -> tuple[int, int] | None:
        """The first step that ran with another number of ranks than the first world, and that number; None if there is
        none."""
        return self.sizes[1] if len(self.sizes) > 1 else None


@dataclass(frozen=True)
class RunEvidence:
    """Everything that the oracles judge a run by."""

    plan: Plan
    reference: Trace
    trace: Trace
    ended: JobResult
    limit_s: float
    """The time limit, after which the run was killed."""
    records: tuple[StrikeRecord, ...]
    nobody: tuple[str, ...]
    """Strikes that found no subject."""
    undone: str
    """Why the plan was not carried out completely; "" if it was."""
    killed_coordinator: bool = False
    places: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Strike -> the slots that it struck."""
    began_wall_s: float | None = None
    """Unix time when the run with faults was started; `StrikeRecord.at_s` is counted from there."""
    began_monotonic_s: float | None = None
    """The same moment on the host's monotonic clock, which all its processes share."""
    struck_s: dict[int, float] = field(default_factory=dict)
    """Strike -> when it struck, counted as `StrikeRecord.at_s`, where the injector knows."""
    again: Trace | None = None
    """A second run without faults, made when there was a difference to explain."""
    may_differ: tuple[str, ...] = ()
    """Patterns of names of untracked state that may differ: ``history``, ``*.cache``."""
    late_s: float = 0.0
    """The longest that the harness was late for a look at the job (due every 20 ms), which shows how busy the machine
    was."""

    def came_late(self, record: StrikeRecord) -> bool:
        """Whether the strike came after everything was committed that the reference commits, so that it could do no
        harm."""
        trace = self.trace
        if trace.last_commit_ms is None or self.began_monotonic_s is None or trace.began_monotonic_s is None:
            return False
        struck_s = self.began_monotonic_s + self.struck_s.get(record.strike.number, record.at_s)
        struck_ms = (struck_s - trace.began_monotonic_s) * 1e3
        return self.reference.gates.keys() <= trace.gates.keys() and struck_ms > trace.last_commit_ms


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one oracle says about a run, and why."""

    oracle: str = ""
    holds: bool | None
    """Whether the run is right; None if that is unknown."""
    because: str


def gate_of(data: bytes) -> Gate:
    return Gate(*struct.unpack("<3d", data))


def read_trace(run: Path, inside: Path, *, whole: bool = True) -> Trace:
    """Read what a run has left.

    ``run`` is its ``--out-dir``, ``inside`` the folder of the chaos hooks. Whatever is missing is left empty. With
    ``whole`` the journal is also replayed and its goodput read, which only a run with faults is judged by.
    """
    trace = Trace(result=read_json(run / "result.json", Result))
    if (inside / "held").is_dir():
        trace.held = {path.name: path.read_text() for path in (inside / "held").iterdir() if not path.suffix}
    trace.witness, trace.ends = read_step_states(inside), read_end_states(inside)
    path = run / "journal.sqlite"
    if path.exists():
        with closing(sqlite3.connect(path)) as journal:
            _read_journal(journal, trace)
        if whole:
            trace.replayed = replay(path)
            with contextlib.suppress(UsageError):
                trace.goodput = read_report(path).goodput
    return trace


def _unpersisted(journal: sqlite3.Connection) -> tuple[str, ...]:
    """Return the breaks and resumes in the journal that are not on disk, where a generation has to be before it is
    announced."""
    on_disk = set(journal.execute("SELECT stage, generation FROM generations"))
    query = "SELECT name, body FROM events WHERE kind = 'command' AND name IN ('BreakGeneration', 'ResumeGeneration')"
    missing = []
    for name, body in journal.execute(query):
        told = msgspec.json.decode(body)
        stage, of = ("break", told) if name == "BreakGeneration" else ("resume", told["plan"])
        if (stage, of["generation"]) not in on_disk:
            missing.append(f"{stage} of generation {of['generation']}")
    return tuple(missing)


def _read_snapshots(journal: sqlite3.Connection, trace: Trace) -> None:
    query = "SELECT name, body FROM events WHERE kind = 'event' AND name IN ('WorkerParked', 'SnapshotDamaged')"
    told = [(name, msgspec.json.decode(body)) for name, body in journal.execute(query)]
    kept = [sorted({step_of(one) for one in of.get("snapshots", ())}) for name, of in told if name == "WorkerParked"]
    gaps = [b - a for steps in kept for a, b in itertools.pairwise(steps) if b > a]
    trace.snapshot_gap = min(gaps, default=None)
    trace.damaged = tuple(int(of["generation"]) for name, of in told if name == "SnapshotDamaged")


def began_wall_s(journal: sqlite3.Connection) -> float | None:
    """Return the Unix time at which the coordinator's clock was 0, or None if the journal has no events.

    Every event was written a moment after it came, so the smallest difference of the two clocks is the best estimate.
    """
    found = journal.execute("SELECT min(wall - at_ms / 1e3) FROM events WHERE kind = 'event'").fetchone()[0]
    return None if found is None else float(found)


def _read_journal(journal: sqlite3.Connection, trace: Trace) -> None:
    def again(what: str, known: object, new: object) -> None:
        if known != new:
            trace.contradictions.append(f"{what}: {known!r}, and later {new!r}")

    trace.began_wall_s = began_wall_s(journal)
    found = journal.execute("SELECT value FROM meta WHERE key = 'began_monotonic_s'").fetchone()
    trace.began_monotonic_s = None if found is None else float(found[0])
    query = "SELECT body FROM generations WHERE stage = 'resume' ORDER BY id"
    trace.plans = [resume_of(body).plan for (body,) in journal.execute(query)]
    if not trace.plans:
        return
    ready = journal.execute("SELECT body FROM events WHERE kind = 'event' AND name = 'WorkerReady' LIMIT 1").fetchone()
    said = {} if ready is None else msgspec.json.decode(ready[0])
    trace.exact = None if ready is None else bool(said.get("exact", False))
    trace.axes = tuple((name, size) for name, size in said.get("mesh", ()))
    trace.unpersisted = _unpersisted(journal)
    _read_snapshots(journal, trace)
    last = "SELECT max(committed_at_ms) FROM units WHERE (step, phase) = (SELECT step, phase FROM units ORDER BY step DESC, phase DESC LIMIT 1)"
    trace.last_commit_ms = journal.execute(last).fetchone()[0]
    eras = RollbackEras({plan.generation: plan for plan in trace.plans})
    for step, phase, gate, generation in journal.execute(
        "SELECT step, phase, gate, generation FROM units ORDER BY generation"
    ):
        if not gate or not eras.counts(Position(step, phase), generation):
            continue  # a unit without a gate: a rank's last report, about a unit before the last one
        agreed = bytes(gate[:24])
        if (
            former := trace.gates.setdefault((step, phase), agreed)
        ) != agreed:  # by its bits: NaN does not equal itself
            again(f"step {step}, phase {phase}", gate_of(former), gate_of(agreed))
    for step, rank, packed, generation in journal.execute(
        "SELECT step, rank, ids, generation FROM ledger WHERE phase = 0 AND ids IS NOT NULL ORDER BY generation"
    ):
        if eras.counts(Position(step), generation):
            ids = struct.unpack(f"<{len(packed) // 8}q", packed)
            known = trace.samples.setdefault(step, {}).setdefault(rank, ids)
            again(f"samples of rank {rank} in step {step}", known, ids)
    bodies = journal.execute("SELECT body FROM recoveries ORDER BY generation")
    trace.recoveries = [msgspec.json.decode(body, type=RecoveryRecord) for (body,) in bodies]
