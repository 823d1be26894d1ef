"""How a job of the workers' tests ended: its losses, samples and state, and what of it its ranks have told."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.link.heartbeat_page import Activity
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import ScriptFailure, WorkerReady
from rackrun.protocol.ids import Generation, Position
from rackrun.protocol.wire import StateCopied, UnitCommitted

__all__ = ["CommittedUnits", "Ended", "Paused", "moments"]


@dataclass(frozen=True)
class Paused:
    """What the agent's side of a rank shows when it answers."""

    at: Position
    activity: Activity
    snapshots: tuple[int, ...]
    checkpoints: int
    """On disk."""


@dataclass
class Ended:
    """How a run ended, and what it computed."""

    exit_code: int = -1
    because: str = ""
    failure: ScriptFailure | None = None
    state: dict[int, dict[str, str]] = field(default_factory=dict)
    """Rank -> what it holds when ``main`` has returned: path -> hash of the bits."""
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> what its script handed to `say`."""
    moments: dict[int, list[str]] = field(default_factory=dict)
    """Rank -> the moments that it lived through."""
    gates: dict[Position, tuple[float, ...]] = field(default_factory=dict)
    counts: dict[Position, set[float]] = field(default_factory=dict)
    """How many samples a unit had, whenever it was told as committed."""
    ids: dict[Position, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    sealed: dict[Position, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    logs: dict[Position, dict[str, Any]] = field(default_factory=dict)
    copied: list[StateCopied] = field(default_factory=list)
    told: list[tuple[int, Position, int]] = field(default_factory=list)
    """Rank, unit, attempt: every commit, as often as it was told."""
    rescaled: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Rank, step, attempt, and in how many attempts before only a scale was missing or outgrown."""
    met: set[int] = field(default_factory=set)
    """Ranks that have met others in a micro-batch that was not their last."""
    paused: dict[int, Paused] = field(default_factory=dict)
    """By rank, when it was first told."""
    ready: dict[int, WorkerReady] = field(default_factory=dict)
    """By slot, the last."""
    plans: list[GenerationPlan] = field(default_factory=list)
    """Every plan after the first."""
    story: list[str] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        return {at.step: gate[0] for at, gate in self.gates.items() if not at.phase}

    @property
    def rolled_back(self) -> bool:
        return any(plan.rollback is not None for plan in self.plans)

    @property
    def restarted(self) -> bool:
        return any("restart" in line for line in self.story)

    def differences(self, other: Ended) -> list[str]:
        """What is not the same, bit for bit. Empty: nothing."""
        found = [] if self.exit_code == other.exit_code == 0 else [f"exit codes {self.exit_code}, {other.exit_code}"]
        for step in sorted(self.losses.keys() | other.losses.keys()):
            mine, theirs = self.losses.get(step), other.losses.get(step)
            if mine != theirs:
                found.append(f"loss of step {step}: {mine} and {theirs}")
        for rank in sorted(self.state.keys() | other.state.keys()):
            mine_, theirs_ = self.state.get(rank, {}), other.state.get(rank, {})
            found += [
                f"rank {rank}: {path}"
                for path in sorted(mine_.keys() | theirs_.keys())
                if mine_.get(path) != theirs_.get(path)
            ]
        for at in sorted(self.ids.keys() | other.ids.keys()):
            if self.samples(at) != other.samples(at):
                found.append(f"samples of {at}")
        return found

    def samples(self, at: Position) -> list[int]:
        """Of all ranks. What a rank that died right after its gate could not report, its page holds."""
        return sorted(sample for ids in {**self.sealed.get(at, {}), **self.ids.get(at, {})}.values() for sample in ids)

    def __str__(self) -> str:
        failure = f"\n{self.failure.traceback}" if self.failure else ""
        return "\n".join([f"exit code {self.exit_code}: {self.because}{failure}", *self.story])


def moments(reference: Ended, rank: int, seed: object, count: int = 1) -> list[int]:
    """``count`` moments of ``rank``'s life at which it may die, the earliest after the first committed steps."""
    lived = reference.moments[rank]
    first = [index for index, what in enumerate(lived) if what.startswith("committed")][1] + 1
    return sorted(random.Random(f"{seed}/{rank}").sample(range(first, len(lived)), count))


class CommittedUnits:
    """Notes in an `Ended` what workers tell as committed: a unit that is told again has the bits that it had before."""

    def __init__(self, ended: Ended, *, tainted: bool, scaled: bool, exact: bool) -> None:
        """``tainted``: a unit may be computed again with other bits; ``scaled``: the batch changes with the number of
        ranks; ``exact``: a loss has the same bits on every number of ranks."""
        self._ended, self._tainted, self._scaled, self._exact = ended, tainted, scaled, exact
        self._told_in: dict[Position, Generation] = {}
        self.resized = False
        """Whether the number of ranks, or their shares, have changed."""

    def record(self, message: UnitCommitted) -> None:
        """AssertionError when a unit that was told before has another gate or other samples now."""
        ended, at = self._ended, message.at
        ended.told.append((message.rank, at, message.attempt))
        if message.rescaled:
            ended.rescaled.append((message.rank, at.step, message.attempt, message.rescaled))
        ended.met |= {message.rank} if message.meets else set()
        ended.counts.setdefault(at, set()).add(message.gate[1])
        others = self._told_in.get(at, message.generation) != message.generation and self.resized
        if others and self._scaled and not self._counts(at, self._told_in[at]):
            del ended.gates[at]  # only ranks that are lost had seen it committed: it has another batch now
        if self._tainted and self._told_in.get(at, message.generation) < message.generation:
            ended.gates[at] = message.gate
        known = ended.gates.setdefault(at, message.gate)
        # A step that is computed again, after a rollback or a restart, has the same bits: timings excepted. On another
        # number of ranks the loss is rounded otherwise, unless it is reduced exactly.
        same = 1 if self.resized and not self._exact else 0
        assert known[same:3] == message.gate[same:3], f"{at}: {known} and then {message.gate}"
        ids = tuple(int(i) for i in np.frombuffer(message.ids, "<i8"))
        if others:
            ended.ids[at] = {}  # only ranks that are lost had seen it committed; it is dealt out anew
        self._told_in[at] = message.generation
        assert ended.ids.setdefault(at, {}).setdefault(message.rank, ids) == ids

    def _counts(self, at: Position, generation: int) -> bool:
        """Whether what was told as committed in that generation still is in the next."""
        return RollbackEras({plan.generation: plan for plan in self._ended.plans}).counts(at, generation)
