"""Ranks are lost one after another with no spare left, down to one, and come back, in an order from a seed: the same training."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.trained import Trained, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "resized.py"
WAIT_S = 60.0
APART = 3
"""Steps from one change to the next, about."""


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
        """Of those that train."""
        members = self.job.status()["core"]["ranks"]
        return [member["slot"].replace("/", "-") for member in members if member["state"] == "training"]

    def lose(self, slot: str) -> None:
        pid = self.folder / "pid" / slot
        number = int(pid.read_text())
        pid.unlink()
        (self.folder / "came" / slot).unlink(missing_ok=True)
        os.kill(number, signal.SIGKILL)
        self.gone.append(slot)
        self.go_on(self.ranks - len(self.gone))

    def take_back(self, slot: str) -> None:
        self.gone.remove(slot)
        (self.folder / "come" / slot).touch()
        self.job.wait_for(lambda status: _is_ready(status, slot), WAIT_S)
        self.go_on(self.ranks - len(self.gone))

    def go_on(self, ranks: int) -> None:
        """A few steps, with so many ranks at the end."""
        self.say_limit(self.limit + APART)
        self.job.wait_for(lambda status: _trains(status, ranks, self.limit), WAIT_S)


def _is_ready(status: dict[str, Any], slot: str) -> bool:
    """It waits, or takes part already."""
    spares = [spare for spare in status["core"]["spares"] if spare["state"] == "ready"]
    return slot in [one["slot"].replace("/", "-") for one in (*spares, *status["core"]["ranks"])]


def _trains(status: dict[str, Any], ranks: int, limit: int) -> bool:
    core, step = status["core"], status["progress"]["position"][0]
    return (core["phase"], core["world_size"]) == ("training", ranks) and step >= limit


@pytest.fixture
def story(start_rackrun: Callable[..., Any], tmp_path: Path) -> Callable[..., Trained]:
    """``story(mode, ranks, steps, reduction, change) -> Trained``; ``change(story)`` does what happens to it."""
    runs = 0

    def run(mode: str, ranks: int, steps: int, reduction: str, change: Callable[[Story], None]) -> Trained:
        nonlocal runs
        folder = tmp_path / f"story-{runs}"
        runs += 1
        for name in ("marks", "held", "pid", "come", "came"):
            (folder / name).mkdir(parents=True)
        (folder / "limit").write_text("0")
        command = ["--standalone", "--nproc-per-node", ranks, "--policy", "swap,shrink,wait"]
        if mode == "fsdp":
            command += ["--preload", "torch.distributed.fsdp,torch.distributed.tensor"]
        job = start_rackrun([*command, SCRIPT, mode, steps, folder, reduction])
        told = Story(job, folder, ranks)
        job.wait_for(lambda status: status["core"]["phase"] == "training", WAIT_S)
        told.go_on(ranks)
        change(told)
        told.say_limit(steps)
        trained = read(job.finish(WAIT_S), folder)
        trained.held = {path.name: path.read_text() for path in (folder / "held").iterdir()}
        assert trained.ran.exit_code == 0, trained
        assert not trained.ran.left_behind, trained
        return trained

    return run


def down_and_up(seed: int, lowest: int = 1) -> Callable[[Story], None]:
    """Down to ``lowest`` ranks and up again; now and then one comes back on the way down, or another is lost on the way up."""

    def change(story: Story) -> None:
        rng = random.Random(seed)
        while story.ranks - len(story.gone) > lowest:
            story.lose(rng.choice(sorted(story.slots())))
            if rng.random() < 0.2:
                story.take_back(rng.choice(story.gone))
        while story.gone:
            story.take_back(rng.choice(story.gone))
            if rng.random() < 0.1:
                story.lose(rng.choice(sorted(story.slots())))

    return change


def assert_nothing_is_lost_or_used_twice(trained: Trained, steps: int) -> None:
    assert sorted(trained.samples) == list(range(steps)), trained
    for step, by_rank in trained.samples.items():
        delivered = [sample for ids in by_rank.values() for sample in ids]
        assert len(delivered) == len(set(delivered)) == 32, f"step {step}\n{trained}"


STORY, SOAK = pytest.mark.stories, (pytest.mark.stories, pytest.mark.soak)


@pytest.mark.parametrize(
    ("mode", "ranks", "seed"),
    [
        ("ddp", 3, 1),
        pytest.param("fsdp", 3, 1, marks=STORY),
        pytest.param("ddp", 8, 1, marks=STORY),
        pytest.param("fsdp", 8, 1, marks=STORY),
        pytest.param("ddp", 8, 2, marks=SOAK),
        pytest.param("fsdp", 8, 2, marks=SOAK),
    ],
)
def test_down_to_one_rank_and_up_again_it_is_the_same_training(
    mode: str, ranks: int, seed: int, story: Callable[..., Trained]
) -> None:
    steps = 3 * APART * ranks + APART
    reference = story(mode, ranks, steps, "exact", lambda story: None)
    trained = story(mode, ranks, steps, "exact", down_and_up(seed))
    assert min(trained.sizes) == 1, trained
    assert trained.sizes[-1] == ranks, trained
    assert trained.gates == reference.gates, trained
    assert trained.held == reference.held, trained
    assert_nothing_is_lost_or_used_twice(trained, steps)
    assert not any(recovery["kind"] == "restart" for recovery in trained.recoveries), trained


@pytest.mark.stories
def test_with_the_fast_reduction_it_is_the_same_but_for_rounding(story: Callable[..., Trained]) -> None:
    """Over the first steps after a change; what rounding makes of it later is another training of the same worth."""
    reference = story("ddp", 4, 60, "fast", lambda story: None)
    trained = story("ddp", 4, 60, "fast", down_and_up(5))
    assert_nothing_is_lost_or_used_twice(trained, 60)
    changed = 20
    for (step, phase), (loss, *samples) in trained.gates.items():
        expected, *same = reference.gates[step, phase]
        assert samples == same, trained
        if step < changed:
            assert loss == pytest.approx(expected, rel=1e-5), trained
    last = [gates[59, 0][0] for gates in (trained.gates, reference.gates)]
    assert last[0] == pytest.approx(last[1], rel=0.01), last
