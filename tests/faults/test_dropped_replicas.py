"""On a mesh, a rank that is lost with no spare left takes its replica with it, and nobody else: the healthy rest of it are the next
spares, and the mesh is whole again once there are enough."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.journal.journal_reader import resume_of
from rackrun.coordinator.report.run_report import read_report
from rackrun.protocol.commands import GenerationPlan
from tests.faults.resized import APART, BATCH, Story
from tests.faults.trained import Trained

pytestmark = [pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(400)]

RACK = """
format: 1
racks:
  - serial: "1825024170029"
    trays: {{count: {trays}, gpus: 2}}
    nvlink: {{domain: 5f4e0c3a-7d1b-4c6e-9a55-0d2f6b8e1c47, clique: 32766}}
"""
STEPS = 6 * APART
FILLER = "sh -c 'trap : TERM; while :; do sleep 0.1; done'"


@dataclass(frozen=True)
class Shape:
    """Its second place along the first axis is ranks 2 and 3."""

    mode: str
    mesh: str
    ranks: int
    alone: str
    """The mesh of one replica, of two ranks."""
    sharing: int
    """Ranks that deliver the same samples."""


SHAPES = [
    pytest.param(
        Shape("hsdp", "dp_replicate=2,dp_shard=2", ranks=4, alone="dp_replicate=1,dp_shard=2", sharing=1), id="hsdp"
    ),
    pytest.param(Shape("tp", "dp=3,tp=2", ranks=6, alone="dp=1,tp=2", sharing=2), id="tp"),
]
Train = Callable[[str, str, int, Callable[[Story], None]], Trained]


@pytest.fixture
def train(story: Callable[..., Trained], tmp_path: Path) -> Train:
    """``train(mode, mesh, ranks, change)``: on a simulated rack whose trays have two GPUs; ranks sit on all of them."""

    def run(mode: str, mesh: str, ranks: int, change: Callable[[Story], None]) -> Trained:
        rack = tmp_path / "rack.yaml"
        rack.write_text(RACK.format(trays=ranks // 2))
        return story(mode, ranks, STEPS, "exact", change, ["--rack", rack, "--mesh", mesh, "--filler", FILLER])

    return run


def seats_in_turn(trained: Trained) -> list[list[tuple[str, int]]]:
    """Whenever somebody else was in the world, by rank: the slot, and which start of a process it is."""
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT body FROM generations WHERE stage = 'resume' ORDER BY id").fetchall()
    return [found for found, _ in itertools.groupby(seats(resume_of(body).plan) for (body,) in rows)]


def seats(plan: GenerationPlan) -> list[tuple[str, int]]:
    return [(member.slot, member.incarnation) for member in sorted(plan.members, key=lambda member: member.rank)]


def transcript(trained: Trained) -> list[dict[str, Any]]:
    """Whose processes were ended and started by command, in order."""
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        rows = journal.execute(
            "SELECT body FROM events WHERE kind = 'command' AND name IN ('FenceWorker', 'StartWorker') ORDER BY id"
        ).fetchall()
    return [json.loads(body) for (body,) in rows]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_lost_rank_takes_exactly_its_replica_with_it_and_the_rest_of_it_is_the_next_spare(
    shape: Shape, train: Train
) -> None:
    """Sums over tp are floats, also in an exact reduction; but a tp group is always two ranks, and a + b has the bits of b + a."""
    less = shape.ranks - 2
    waiting: dict[str, str] = {}

    def change(story: Story) -> None:
        slots = story.slots()
        story.lose(slots[3], ranks=less, along=[slots[2]])
        spares = story.let_come(slots[2])["core"]["spares"]
        waiting.update({spare["slot"]: spare["state"] for spare in spares})
        story.go_on(less)  # one alone is no replica
        story.lose(slots[0], ranks=less)
        for slot in (slots[0], slots[3]):
            story.let_come(slot)
        story.go_on(shape.ranks)

    trained = train(shape.mode, shape.mesh, shape.ranks, change)
    first, dropped, swapped, whole = seats_in_turn(trained)
    healthy, lost, then_lost = first[2][0], first[3][0], first[0][0]

    assert dropped == [*first[:2], *first[4:]], trained
    assert waiting == {healthy: "ready", lost: "starting"}, trained
    assert (swapped[0][0], swapped[1:]) == (healthy, dropped[1:]), trained
    assert set(swapped) < set(whole), trained
    assert {slot for slot, _ in whole} == {slot for slot, _ in first}, trained

    commands = transcript(trained)
    (fenced,) = [one for one in commands if one["command"] == "FenceWorker"]
    assert (fenced["slot"], fenced["incarnation"], fenced["fault"]) == (*first[2], False), trained
    assert fenced["because"] == "its replica has lost a rank: it will wait as a spare"
    again = [one for one in commands[commands.index(fenced) :] if one["command"] == "StartWorker"]
    assert all(one["spare"] for one in again), trained
    assert sorted(one["slot"] for one in again) == sorted([healthy, lost, then_lost]), trained
    assert swapped[0] in [(one["slot"], one["incarnation"]) for one in again], trained

    report = read_report(trained.ran.out_dir / "journal.sqlite")
    shrink, swap, grow = [one for one in report.recoveries if one.recovery.kind != "regroup"]
    assert (shrink.recovery.rungs, swap.recovery.rungs) == (("shrink",), ("swap",)), trained
    assert f"rank 3 lost on {lost} (SIGKILL); {healthy} will wait as a spare -> {less} ranks go on" in shrink.line
    assert f"rank 0 lost on {then_lost} (SIGKILL) -> {healthy}" in swap.line
    assert f"join at a step boundary -> {shape.ranks} ranks go on" in grow.line
    assert report.ledger.ok, report.ledger
    (beside,) = [one for one in report.fillers if one.slot == healthy]
    assert beside.had_to_go, "as beside any spare, one ran beside it until it was needed"

    reference = train(shape.mode, shape.alone, 2, lambda story: None)
    assert trained.gates == reference.gates, trained
    assert len(trained.held) == shape.ranks, trained
    assert {*trained.held.values()} == {*reference.held.values()}, trained
    for step in range(STEPS):
        delivered = Counter(sample for ids in trained.samples[step].values() for sample in ids)
        assert (len(delivered), {*delivered.values()}) == (BATCH, {shape.sharing}), f"step {step}\n{trained}"
