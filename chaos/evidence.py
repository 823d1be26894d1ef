"""What a run has left: what it computed, as its journal and its ranks tell it, and how it ended. Oracles judge by it."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rackrun.chaos.conductor import Record
from rackrun.chaos.job import Ended
from rackrun.chaos.plan import Plan
from rackrun.coordinator.eras import Eras
from rackrun.coordinator.reading import resume_of
from rackrun.core.commands import Plan as WorldPlan
from rackrun.core.ids import Position
from rackrun.launch.place import Result, read_json

__all__ = ["Evidence", "Gate", "Trace", "Verdict", "read_trace"]


class Gate(msgspec.Struct, frozen=True, array_like=True):
    """What the world agreed on when it committed a step or a phase, exact."""

    loss: float
    samples: float
    digest: float
    """Of their ids."""


@dataclass
class Trace:
    """One run."""

    gates: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(step, phase) -> its `Gate`, bit for bit."""
    samples: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Step -> rank -> ids that it counted; a rank whose agent was lost may be missing from its last steps."""
    contradictions: list[str] = field(default_factory=list)
    """Steps that were computed again, with another result."""
    held: dict[str, str] = field(default_factory=dict)
    """Rank -> digest of all that it held at its end."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    result: Result | None = None
    """As the launcher wrote it."""

    @property
    def steps(self) -> int:
        return len({step for step, phase in self.gates if not phase})


@dataclass(frozen=True)
class Evidence:
    plan: Plan
    reference: Trace
    trace: Trace
    ended: Ended
    limit_s: float
    """It was killed after that."""
    records: tuple[Record, ...]
    nobody: tuple[str, ...]
    """Strikes that had no target."""
    undone: str
    """Why the plan was not carried out to its end; "": it was."""
    killed_coordinator: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    oracle: str = ""
    holds: bool | None
    """None: unknown."""
    because: str


def gate_of(data: bytes) -> Gate:
    return Gate(*struct.unpack("<3d", data))


def read_trace(run: Path, inside: Path) -> Trace:
    """``run``: its ``--out-dir``. What is not there is empty."""
    trace = Trace(result=read_json(run / "result.json", Result))
    if (inside / "held").is_dir():
        trace.held = {path.name: path.read_text() for path in (inside / "held").iterdir() if not path.suffix}
    path = run / "journal.sqlite"
    if path.exists():
        with closing(sqlite3.connect(path)) as journal:
            _read_journal(journal, trace)
    return trace


def _read_journal(journal: sqlite3.Connection, trace: Trace) -> None:
    def again(what: str, known: object, new: object) -> None:
        if known != new:
            trace.contradictions.append(f"{what}: {known!r}, and later {new!r}")

    plans: dict[int, WorldPlan] = {
        (plan := resume_of(body).plan).generation: plan
        for (body,) in journal.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
    }
    if not plans:
        return
    eras = Eras(plans)
    for step, phase, gate, generation in journal.execute(
        "SELECT step, phase, gate, generation FROM units ORDER BY generation"
    ):
        if not gate or not eras.counts(Position(step, phase), generation):
            continue  # without a gate: a rank's last words, about a unit before the last one
        agreed = bytes(gate[:24])
        again(f"step {step}, phase {phase}", gate_of(trace.gates.setdefault((step, phase), agreed)), gate_of(agreed))
    for step, rank, packed, generation in journal.execute(
        "SELECT step, rank, ids, generation FROM ledger WHERE phase = 0 AND ids IS NOT NULL ORDER BY generation"
    ):
        if eras.counts(Position(step), generation):
            ids = struct.unpack(f"<{len(packed) // 8}q", packed)
            known = trace.samples.setdefault(step, {}).setdefault(rank, ids)
            again(f"samples of rank {rank} in step {step}", known, ids)
    bodies = journal.execute("SELECT body FROM recoveries ORDER BY generation")
    trace.recoveries = [msgspec.json.decode(body) for (body,) in bodies]
