"""The whole job is lost, or told to end: the same command goes on from the newest checkpoint, and it is the same training."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.checkpoint.durable.durable_store import DurableStore
from tests.faults.scripts.strike import Fault
from tests.faults.trained import STEPS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]


def assert_the_rest_is_the_same(trained: Trained, reference: Trained, *, at_most: int) -> int:
    """Returns the first step that was done."""
    assert trained.ran.exit_code == 0, trained
    assert not trained.ran.left_behind, trained
    steps = sorted(trained.samples)
    assert steps == list(range(steps[0], STEPS)), trained
    assert steps[0] <= at_most, trained
    assert trained.held == reference.held, trained
    assert trained.gates.items() <= reference.gates.items(), trained
    assert {step: trained.samples[step] for step in steps} == {step: reference.samples[step] for step in steps}
    return steps[0]


def after_the_newest(folder: Path) -> int:
    """The step after that of the newest whole checkpoint. (While one is written, later ones are skipped: which it is
    depends on the disk.)"""
    return max(info.step for info in DurableStore(folder, "run").checkpoints()) + 1


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_launcher_is_killed(mode: str, train: Train, reference: Reference, tmp_path: Path) -> None:
    killed = train(
        mode, [Fault(name="launcher", place="backward", rank=1, step=9, then="LAUNCHER")], checkpoints=tmp_path
    )
    assert killed.ran.exit_code == -signal.SIGKILL, killed
    first = after_the_newest(tmp_path)
    again = train(mode, checkpoints=tmp_path)
    assert assert_the_rest_is_the_same(again, reference(mode), at_most=first) == first


@pytest.mark.stories
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_it_is_told_to_end(mode: str, train: Train, reference: Reference, tmp_path: Path) -> None:
    """With a checkpoint of its last step, which no interval asked for."""
    ended = train(mode, [Fault(name="term", place="backward", rank=1, step=6, then="TERM")], checkpoints=tmp_path)
    assert ended.ran.exit_code == 128 + signal.SIGTERM, ended
    last = max(ended.samples)
    again = train(mode, checkpoints=tmp_path)
    assert assert_the_rest_is_the_same(again, reference(mode), at_most=last + 1) == last + 1


@pytest.mark.stories
@pytest.mark.parametrize(("copies", "trays", "spares"), [("mirror", 3, 8), ("xor", 6, 2)])
def test_a_tray_and_who_keeps_its_copies_are_lost_together(
    copies: str, trays: int, spares: int, train: Train, reference: Reference, tmp_path: Path
) -> None:
    """No copy in memory is left, and the world begins again by itself: from the disk, and says so."""
    faults = [Fault(name="both", place="backward", rank=1, step=9, then="AGENT AND HOLDER")]
    trained = train("fsdp", faults, spares=spares, trays=trays, checkpoints=tmp_path, copies=copies)
    assert trained.ran.exit_code == 0, trained
    assert [recovery["kind"] for recovery in trained.recoveries] == ["restart"], trained
    assert re.search(r"resumed after step [1357]\b", trained.ran.stderr), trained
    assert trained.held == reference("fsdp").held, trained
    assert trained.gates == reference("fsdp").gates, trained
    assert not trained.contradictions, trained


@pytest.mark.stories
def test_without_checkpoints_such_a_loss_ends_the_job_with_the_reason(train: Train) -> None:
    trained = train(
        "fsdp", [Fault(name="both", place="backward", rank=1, step=12, then="AGENT AND HOLDER")], spares=8, trays=3
    )
    assert trained.ran.exit_code == 3, trained
    assert "no copy of its state is left" in trained.ran.stderr, trained
    assert "--checkpoint-dir" in trained.ran.stderr, trained
    assert not trained.ran.left_behind, trained


@pytest.mark.stories
def test_ranks_are_lost_before_and_after_the_job(train: Train, reference: Reference, tmp_path: Path) -> None:
    """A newcomer has written a part of the checkpoint; and one takes over right after the resumption."""
    before = [
        Fault(name="rank", place="forward", rank=2, step=4),
        Fault(name="launcher", place="between steps", rank=0, step=10, then="LAUNCHER", after="rank"),
    ]
    train("fsdp", before, spares=2, checkpoints=tmp_path)
    first = after_the_newest(tmp_path)
    faults = [Fault(name="early", place="between steps", rank=1, step=12)]
    again = train("fsdp", faults, spares=2, checkpoints=tmp_path)
    assert again.struck, again
    assert assert_the_rest_is_the_same(again, reference("fsdp"), at_most=first) == first
