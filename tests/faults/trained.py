"""What a run of ``scripts/train.py`` computed, as its journal, its ranks and its launcher tell it."""

from __future__ import annotations

import itertools
import json
import sqlite3
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.coordinator.journal.journal_reader import resume_of
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position

if TYPE_CHECKING:
    from tests.conftest import Ran
    from tests.faults.scripts.strike import Fault

__all__ = ["RANKS", "STEPS", "Trained", "read"]

RANKS, STEPS = 4, 14


@dataclass
class Trained:
    ran: Ran
    gates: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    """(step, phase) -> what the world agreed on in its gate, exact: the loss over the global batch, and how many samples
    were delivered, with a digest of their ids."""
    contradictions: list[str] = field(default_factory=list)
    """A unit that was computed again, after a rollback or a restart, with another loss or other samples."""
    samples: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Step -> rank -> ids that were delivered."""
    held: dict[str, Any] = field(default_factory=dict)
    """What each rank held as its last act, and what all held in the phase after the last step."""
    told: list[str] = field(default_factory=list)
    """The lines that were printed for the steps."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    breaks: list[float] = field(default_factory=list)
    """When generations were broken, Unix time."""
    struck: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Faults that struck -> when, whom."""
    address: tuple[str, int] = ("", 0)
    """Of the coordinator, if it left that behind."""
    sizes: list[int] = field(default_factory=list)
    """Of the world, whenever it changed."""
    worlds: tuple[int, tuple[tuple[int, int], ...]] = (0, ())
    """`GenerationPlan.full` and `GenerationPlan.worlds` of the last plan."""
    slowest_s: float = 0.0
    """The 99th percentile of the durations of committed steps."""

    unheard: frozenset[int] = frozenset()
    """Ranks whose agent was lost, and with it what they had told it in the last 20 ms: the ledger may lack their rows. (The
    gates, which the others tell of too, still show how many samples were delivered, and a digest of which.)"""

    def differences(self, other: Trained) -> list[str]:
        """Empty: it is the same training, bit for bit."""
        found = list(self.contradictions)
        found += _unlike("gate of", self.gates, other.gates)
        for step in sorted(self.samples.keys() | other.samples.keys()):
            mine, theirs = self.samples.get(step, {}), other.samples.get(step, {})
            if self.unheard and mine.items() <= theirs.items() and theirs.keys() - mine.keys() <= self.unheard:
                continue
            if _all(mine) != _all(theirs):
                found.append(f"samples of step {step}: {mine}, not {theirs}")
        found += _unlike("held in", self.held, other.held)
        if self.told != other.told:
            found.append("printed:\n  " + "\n  ".join(self.told))
        return found

    def assert_same_training(self, reference: Trained, faults: Sequence[Fault]) -> None:
        """It ended well, every fault struck, and all that it computed is what the reference computed."""
        found = [] if self.ran.exit_code == 0 else [f"exit code {self.ran.exit_code}"]
        found += [f"the fault {fault.name!r} never struck" for fault in faults if fault.name not in self.struck]
        found += [f"left behind: {process}" for process in self.ran.left_behind]
        found += self.unexplained()
        assert not found, f"{'; '.join(found)}\n{self}"
        found = self.differences(reference)
        assert not found, "another training than without faults:\n  " + "\n  ".join(found) + f"\n{self}"
        twice = [step for step, by_rank in self.samples.items() if len(_all(by_rank)) != len(set(_all(by_rank)))]
        assert not twice, f"samples delivered twice in steps {twice}"

    def unexplained(self) -> list[str]:
        """Recoveries of which the report does not say what was decided, why, and at what cost."""
        found = []
        for one in self.recoveries:
            if not one["rungs"] or len(one["reasons"]) != len(one["rungs"]) or not one["predicted_gpu_s"]:
                found.append(f"generation {one['generation']}: nobody says what was decided")
            elif one["measured_gpu_s"] is None and not one["overtaken"]:
                found.append(f"generation {one['generation']}: nobody says what it cost")
        return found

    def __str__(self) -> str:
        story = [f"  {r['generation']}: {r['kind']}: {r['because']}, rollback {r['rollback']}" for r in self.recoveries]
        struck = [f"  {name}: {how}" for name, how in self.struck.items()]
        return "\n".join(["recoveries:", *story, "struck:", *struck, str(self.ran)])


def read(ran: Ran, folder: Path) -> Trained:
    """``folder`` holds ``marks`` and ``held``."""
    trained = Trained(ran)
    trained.told = [line for line in ran.stdout.splitlines() if line.startswith("step ")]
    trained.held = {path.name: json.loads(path.read_text()) for path in sorted((folder / "held").glob("*.json"))}
    trained.struck = {path.name: json.loads(path.read_text()) for path in sorted((folder / "marks").iterdir())}
    endpoint = ran.out_dir / "endpoint.json"
    if endpoint.exists():
        url = urlsplit(json.loads(endpoint.read_text())["url"])
        trained.address = (url.hostname or "", url.port or 0)
    path = ran.out_dir / "journal.sqlite"
    if not path.exists():
        return trained
    journal = sqlite3.connect(path)
    try:
        _read_journal(journal, trained)
    finally:
        journal.close()
    return trained


def _read_journal(journal: sqlite3.Connection, trained: Trained) -> None:
    def again(what: str, known: Any, new: Any) -> None:
        if known != new:
            trained.contradictions.append(f"{what}: {known}, and later {new}")

    durations = []
    plans: dict[int, GenerationPlan] = {
        (plan := resume_of(body).plan).generation: plan
        for (body,) in journal.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id")
    }
    trained.sizes = [size for size, _ in itertools.groupby(plan.world_size for plan in plans.values())]
    newest = plans[max(plans)]
    trained.worlds = newest.full, newest.worlds
    eras = RollbackEras(plans)
    for step, phase, seconds, gate, generation in journal.execute(
        "SELECT step, phase, seconds, gate, generation FROM units ORDER BY generation"
    ):
        # without a gate: a rank's last words, about a unit before the last one
        if any(plan.anew and plan.generation > generation and step > plan.rollback for plan in plans.values()):
            continue  # it was wrong, and was computed again
        if not gate or not eras.counts(Position(step, phase), generation):
            continue
        agreed = struct.unpack("<3d", gate[:24])
        again(f"gate of {(step, phase)}", trained.gates.setdefault((step, phase), agreed), agreed)
        durations.append(seconds)
    trained.slowest_s = sorted(durations)[int(0.99 * len(durations))] if durations else 0.0
    query = "SELECT step, rank, ids, generation FROM ledger WHERE phase = 0 ORDER BY generation"
    for step, rank, packed, generation in journal.execute(query):
        if not eras.counts(Position(step), generation):
            continue
        ids = struct.unpack(f"<{len(packed) // 8}q", packed)
        again(f"samples of rank {rank} in step {step}", trained.samples.setdefault(step, {}).setdefault(rank, ids), ids)
    trained.recoveries = [json.loads(b) for (b,) in journal.execute("SELECT body FROM recoveries ORDER BY generation")]
    trained.breaks = [
        wall for (wall,) in journal.execute("SELECT wall FROM generations WHERE stage = 'break' ORDER BY id")
    ]


def _all(by_rank: Mapping[int, Sequence[int]]) -> list[int]:
    return sorted(sample for ids in by_rank.values() for sample in ids)


def _unlike(what: str, mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[str]:
    return [
        f"{what} {key}: {mine.get(key)}, not {theirs.get(key)}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
