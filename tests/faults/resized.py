"""``scripts/resized.py`` under a test that kills ranks, lets others come, and says how far they may go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rackrun.ctl.coordinator_client import ask
from rackrun.protocol.commands import Answer
from tests.faults.trained import Trained

__all__ = ["APART", "BATCH", "WAIT_S", "Story", "assert_nothing_is_lost_or_used_twice"]

WAIT_S = 60.0
APART = 3
"""Steps from one change to the next, about."""
BATCH = 32


@dataclass
class Story:
    """A job whose world a test makes smaller and larger."""

    job: Any
    folder: Path
    ranks: int
    limit: int = 0
    gone: list[str] = field(default_factory=list)
    """Slots whose worker was killed, and waits."""

    def say_limit(self, limit: int) -> None:
        """So far it may go."""
        self.limit = limit
        (self.folder / "limit.new").write_text(str(limit))
        (self.folder / "limit.new").rename(self.folder / "limit")

    def slots(self) -> list[str]:
        """Of those that train, by rank."""
        members = self.job.status()["core"]["ranks"]
        return [as_file(member["slot"]) for member in members if member["state"] == "training"]

    def pid(self, slot: str) -> int:
        """Of the process that entered main there last."""
        return int((self.folder / "pid" / slot).read_text())

    def lose(self, slot: str, *, ranks: int | None = None, along: Collection[str] = ()) -> None:
        """Kill it. ``ranks``: how many train then; ``along``: whose processes end with it, to come again as spares."""
        number = self.pid(slot)
        (self.folder / "pid" / slot).unlink()
        for one in (slot, *along):
            (self.folder / "came" / one).unlink(missing_ok=True)
        os.kill(number, signal.SIGKILL)
        self.gone.append(slot)
        self.go_on(self.ranks - len(self.gone) if ranks is None else ranks)

    def lose_both(self, slot: str, other: str) -> None:
        """The ``other`` as soon as the world breaks for the first."""
        before = self.job.status()["core"]["generation"]
        numbers = [self.pid(one) for one in (slot, other)]
        for one in (slot, other):
            (self.folder / "pid" / one).unlink()
            (self.folder / "came" / one).unlink(missing_ok=True)
        os.kill(numbers[0], signal.SIGKILL)
        self.job.wait_for(lambda status: status["core"]["generation"] > before, WAIT_S)
        os.kill(numbers[1], signal.SIGKILL)
        self.gone += [slot, other]
        self.go_on(self.ranks - len(self.gone))

    def ask(self, what: str, **fields: object) -> Callable[[], Answer]:
        """As ``rackctl`` does. What is returned waits for the last answer; whoever pauses for it has a step to do first."""
        answer = self._answer(f"/api/{what}", msgspec.json.encode(fields))
        assert answer.outcome == "begun", answer
        return lambda: self._answer(f"/api/answer?request={answer.request}")

    def _answer(self, path: str, data: bytes | None = None) -> Answer:
        return msgspec.json.decode(ask(self.job.out_dir, path, data, timeout_s=WAIT_S), type=Answer)

    def take_back(self, slot: str) -> None:
        self.gone.remove(slot)
        self.let_come(slot)
        self.go_on(self.ranks - len(self.gone))

    def let_come(self, slot: str) -> dict[str, Any]:
        """Until it waits as a spare, or takes part already."""
        (self.folder / "come" / slot).touch()
        status: dict[str, Any] = self.job.wait_for(lambda status: _is_ready(status, slot), WAIT_S)
        return status

    def go_on(self, ranks: int) -> None:
        """A few steps, with so many ranks at the end."""
        self.say_limit(self.limit + APART)
        self.job.wait_for(lambda status: _trains(status, ranks, self.limit), WAIT_S)


def as_file(slot: str) -> str:
    return slot.replace("/", "-")


def _is_ready(status: dict[str, Any], slot: str) -> bool:
    spares = [spare for spare in status["core"]["spares"] if spare["state"] == "ready"]
    return slot in [as_file(one["slot"]) for one in (*spares, *status["core"]["ranks"])]


def _trains(status: dict[str, Any], ranks: int, limit: int) -> bool:
    core, step = status["core"], status["progress"]["position"][0]
    return (core["phase"], core["world_size"]) == ("training", ranks) and step >= limit


def assert_nothing_is_lost_or_used_twice(trained: Trained, steps: int) -> None:
    assert sorted(trained.samples) == list(range(steps)), trained
    for step, by_rank in trained.samples.items():
        delivered = [sample for ids in by_rank.values() for sample in ids]
        assert len(delivered) == len(set(delivered)) == BATCH, f"step {step}\n{trained}"
