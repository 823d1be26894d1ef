"""A bit flips in one rank's memory, in whole jobs: the rank is found and replaced, and the training ends as if nothing had been."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.checkpoint.durable.probation import Probation
from rackrun.coordinator.report.run_report import read_report
from tests.faults.scripts.strike import Fault
from tests.faults.trained import RANKS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]
Reference = Callable[..., Trained]
CHECK = ["--check-replicas", 4]
"""Compared are steps 2, 4, 8, 12 and 13, the last."""
SPOILT = ["step 5", "step 6", "step 7"]


PARAMETER, MOMENT = "/param/", "exp_avg_sq"


def spares_are_ready(spares: int = 1) -> Fault:
    """Or whoever is wrong stays. Ranks say that they are ready twice: once they know who is whose replica, too."""
    until = f"event WorkerReady {2 * RANKS + spares}"
    return Fault(name="ready", place="between steps", rank=0, step=3, then="wait", until=until)


def flip(tensor: str, rank: int = 2, step: int = 5) -> Fault:
    return Fault(name=f"flip {rank}", place="between steps", rank=rank, step=step, then="FLIP", tensor=tensor)


def assert_same_end(trained: Trained, reference: Trained) -> None:
    """Bit for bit. What a loop has printed of spoilt steps it prints again only where somebody has taken over in it."""
    found = [line for line in trained.differences(reference) if not line.startswith("printed")]
    assert (trained.ran.exit_code, found) == (0, []), trained
    assert last(trained.told) == last(reference.told), trained


def last(told: list[str]) -> dict[str, str]:
    """Of each step and phase that was not spoilt, or was told from inside."""
    found = {line.partition("  ")[0]: line for line in told}
    return {name: line for name, line in found.items() if name not in SPOILT}


@pytest.mark.parametrize("tensor", [PARAMETER, pytest.param(MOMENT, marks=pytest.mark.stories)])
def test_a_flipped_bit_is_found_by_the_next_comparison_and_the_run_ends_bit_for_bit(
    tensor: str, train: Train, reference: Reference
) -> None:
    trained = train("ddp", [spares_are_ready(), flip(tensor)], options=CHECK)
    assert "flip 2" in trained.struck, trained
    assert_same_end(trained, reference("ddp"))
    (recovery,) = trained.recoveries
    (lost,) = recovery["lost"]
    assert (recovery["kind"], recovery["rollback"], lost["rank"]) == ("swap", 3, 2), trained
    assert lost["how"] == "its state differs from that of its replicas, seen in step 8", trained
    report = read_report(trained.ran.out_dir / "journal.sqlite")
    told = "rank 2 holds another state than its replicas, seen in step 8; good is what was there after step 3"
    assert told in [notice.text for notice in report.notices]
    assert report.ledger.ok, report.ledger


@pytest.mark.stories
@pytest.mark.parametrize(("tensor", "rank"), [(PARAMETER, 0), (MOMENT, 3)])
def test_of_two_replicas_of_a_shard_the_one_is_blamed_whose_bits_do_not_come_again(
    tensor: str, rank: int, train: Train, reference: Reference
) -> None:
    trained = train("hsdp", [spares_are_ready(), flip(tensor, rank)], options=CHECK)
    assert_same_end(trained, reference("hsdp"))
    undecided, decided = trained.recoveries
    assert (undecided["lost"], undecided["rollback"]) == ([], 3), trained
    assert ([one["rank"] for one in decided["lost"]], decided["rollback"]) == ([rank], None), trained
    report = read_report(trained.ran.out_dir / "journal.sqlite")
    assert any(notice.text.startswith(f"rank {rank} holds another state") for notice in report.notices)
    assert report.ledger.ok, report.ledger


def kill(rank: int, place: str, step: int | None = 8) -> Fault:
    return Fault(name=f"kill {rank}", place=place, rank=rank, step=step, after="flip 2")


COMPARING, JUDGING = "before compare", "before judge"
TELLING, TOLD = "before differ", "after differ"
GOING_BACK = "before load"


@pytest.mark.stories
@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("ddp", kill(3, COMPARING)),
        ("ddp", kill(3, JUDGING)),
        ("ddp", kill(3, TELLING)),
        ("ddp", kill(2, TOLD)),
        ("ddp", kill(3, GOING_BACK, None)),
        ("hsdp", kill(3, COMPARING)),
        ("hsdp", kill(0, TELLING)),
        ("hsdp", kill(3, GOING_BACK, None)),
    ],
    ids=lambda one: one if isinstance(one, str) else f"rank {one.rank} {one.place}",
)
def test_a_rank_dies_while_they_compare_or_go_back(mode: str, loss: Fault, train: Train, reference: Reference) -> None:
    """Whoever it is, and whether the comparison has come to an end or not. The liar is rank 2."""
    others = [rank for rank in range(RANKS) if rank != loss.rank]
    held_back = [
        Fault(name=f"held back {rank}", place=JUDGING, rank=rank, step=8, after="flip 2", then="wait", until=loss.name)
        for rank in others
        if mode == "ddp"
        and loss.place in (JUDGING, TELLING, TOLD)  # or one of them ends it, before the lost rank comes so far
    ]
    trained = train(mode, [spares_are_ready(4), flip(PARAMETER), loss, *held_back], spares=4, options=CHECK)
    assert loss.name in trained.struck, trained
    assert_same_end(trained, reference(mode))
    assert 3 in [recovery["rollback"] for recovery in trained.recoveries], trained
    assert read_report(trained.ran.out_dir / "journal.sqlite").ledger.ok


@pytest.mark.stories
def test_when_no_two_are_alike_all_compute_again(train: Train, reference: Reference) -> None:
    faults = [flip(PARAMETER, rank, step) for rank, step in ((0, 4), (1, 5), (2, 6))]
    trained = train("ddp", faults, options=CHECK)
    assert_same_end(trained, reference("ddp"))
    (recovery,) = trained.recoveries
    assert (recovery["lost"], recovery["rollback"]) == ([], 3), trained


@pytest.mark.stories
def test_a_checkpoint_of_a_spoilt_step_is_taken_by_no_start(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    trained = train(
        "ddp", [spares_are_ready(), flip(PARAMETER)], options=[*CHECK, "--checkpoint-keep", 20], checkpoints=folder
    )
    assert trained.ran.exit_code == 0, trained
    assert set(Probation(folder / "run").quarantined()) == {5, 7}


@pytest.mark.stories
def test_without_a_flip_nothing_is_found(train: Train, reference: Reference) -> None:
    trained = train("ddp", options=["--check-replicas", 1])
    trained.assert_same_training(reference("ddp"), [])
    assert not trained.recoveries, trained
    with contextlib.closing(sqlite3.connect(trained.ran.out_dir / "journal.sqlite")) as journal:
        assert journal.execute("SELECT count(*) FROM events WHERE name = 'ReplicasDiffer'").fetchone() == (0,)
