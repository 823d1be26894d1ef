"""What a run of ``scripts/train.py`` computed, as its journal, its ranks and its launcher tell it."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from conftest import Ran

    from tests.faults.scripts.strike import Fault

__all__ = ["RANKS", "STEPS", "Trained", "read"]

RANKS, STEPS = 4, 14


@dataclass
class Trained:
    ran: Ran
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """(step, phase) -> the loss over the global batch that the world agreed on in its gate: exact float64."""
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
    slowest_s: float = 0.0
    """The 99th percentile of the durations of committed steps."""

    @property
    def ids(self) -> dict[int, list[int]]:
        return {step: sorted(i for ids in by_rank.values() for i in ids) for step, by_rank in self.samples.items()}

    def differences(self, other: Trained) -> list[str]:
        """Empty: it is the same training, bit for bit."""
        found = list(self.contradictions)
        for at in sorted(self.losses.keys() | other.losses.keys()):
            if self.losses.get(at) != other.losses.get(at):
                found.append(f"loss of {at}: {self.losses.get(at)}, not {other.losses.get(at)}")
        for step in sorted(self.ids.keys() | other.ids.keys()):
            mine, theirs = self.ids.get(step, []), other.ids.get(step, [])
            if mine != theirs:
                found.append(f"samples of step {step}: {len(mine)} of {len(theirs)}, {sorted(set(mine) ^ set(theirs))}")
        for name in sorted(self.held.keys() | other.held.keys()):
            if self.held.get(name) != other.held.get(name):
                found.append(f"{name}: {self.held.get(name)}, not {other.held.get(name)}")
        if self.told != other.told:
            found.append("printed:\n  " + "\n  ".join(self.told))
        return found

    def assert_same_training(self, reference: Trained, faults: Sequence[Fault]) -> None:
        """It ended well, every fault struck, and all that it computed is what the reference computed."""
        found = [] if self.ran.exit_code == 0 else [f"exit code {self.ran.exit_code}"]
        found += [f"the fault {fault.name!r} never struck" for fault in faults if fault.name not in self.struck]
        found += [f"left behind: {process}" for process in self.ran.left_behind]
        assert not found, f"{'; '.join(found)}\n{self}"
        found = self.differences(reference)
        assert not found, "another training than without faults:\n  " + "\n  ".join(found) + f"\n{self}"
        twice = [step for step, ids in self.ids.items() if len(ids) != len(set(ids))]
        assert not twice, f"samples delivered twice in steps {twice}"

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
    for step, phase, seconds, gate in journal.execute(
        "SELECT step, phase, seconds, gate FROM units ORDER BY generation"
    ):
        (loss,) = struct.unpack("<d", gate[:8])
        again(f"loss of {(step, phase)}", trained.losses.setdefault((step, phase), loss), loss)
        durations.append(seconds)
    trained.slowest_s = sorted(durations)[int(0.99 * len(durations))] if durations else 0.0
    query = "SELECT step, rank, ids FROM ledger WHERE phase = 0 ORDER BY generation"
    for step, rank, packed in journal.execute(query):
        ids = struct.unpack(f"<{len(packed) // 8}q", packed)
        again(f"samples of rank {rank} in step {step}", trained.samples.setdefault(step, {}).setdefault(rank, ids), ids)
    trained.recoveries = [json.loads(b) for (b,) in journal.execute("SELECT body FROM recoveries ORDER BY generation")]
    trained.breaks = [
        wall for (wall,) in journal.execute("SELECT wall FROM generations WHERE stage = 'break' ORDER BY id")
    ]
