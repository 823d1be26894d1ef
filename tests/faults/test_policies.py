"""What is done about a lost rank is the user's to say; what is trained stays the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rackrun.coordinator.report.run_report import read_report
from tests.faults.stories import IN_A_UNIT, Chapter
from tests.faults.trained import Trained

pytestmark = [pytest.mark.slow, pytest.mark.stories]

Train = Callable[..., Trained]
Reference = Callable[[str], Trained]

LOST = IN_A_UNIT["ddp"]["in forward"]
TWO_LOSSES = [*LOST(Chapter(1, 3, 1)), *LOST(Chapter(2, 8, 2))]

MINE = """
from rackrun.policy import Decision, Rung
asked = 0

def choose(failure, view):
    global asked
    if not view.takeovers:
        return None  # the spares are still starting
    asked += 1
    if asked > 1:
        raise ValueError("that was enough")
    return Decision(rung=Rung.SWAP, reason="spares are there for that")
"""


def test_a_function_is_asked_and_the_default_decides_when_it_fails(
    train: Train, reference: Reference, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    trained = train("ddp", TWO_LOSSES, spares=2, policy="mine:choose", path=tmp_path)
    trained.assert_same_training(reference("ddp"), TWO_LOSSES)
    first, second = trained.recoveries
    assert first["rungs"][-1] == second["rungs"][-1] == "swap"
    notices = [notice.text for notice in read_report(trained.ran.out_dir / "journal.sqlite").notices]
    if any("gave no answer" in notice or "is still being loaded" in notice for notice in notices):
        return  # a machine so slow that it had no second to spare: the default has decided, and that is said
    assert first["reasons"][-1].startswith("swap: spares are there for that (4 x (")
    assert second["reasons"][-1].startswith("swap: 4 x (")
    assert "the policy mine:choose failed with ValueError: that was enough; the default decides" in notices
    assert "line 11, in choose" in trained.ran.stderr, "the function's own traceback is there to be read"


def test_all_ranks_are_held_until_the_workers_that_start_can_take_over(train: Train, reference: Reference) -> None:
    trained = train("ddp", TWO_LOSSES, spares=0, policy="swap,hold")
    trained.assert_same_training(reference("ddp"), TWO_LOSSES)
    assert [one["rungs"] for one in trained.recoveries] == [["hold", "swap"], ["hold", "swap"]], trained
    notices = [notice.text for notice in read_report(trained.ran.out_dir / "journal.sqlite").notices]
    assert sum(notice.startswith("all ranks wait in a hold") for notice in notices) == 2, notices


def test_a_restart_from_the_newest_checkpoint_may_be_wanted_instead_of_a_swap(
    train: Train, reference: Reference, tmp_path: Path
) -> None:
    trained = train("ddp", TWO_LOSSES, policy="restart,stop", checkpoints=tmp_path / "checkpoints")
    trained.assert_same_training(reference("ddp"), TWO_LOSSES)
    assert [one["kind"] for one in trained.recoveries] == ["restart", "restart"], trained
    assert [one["rungs"] for one in trained.recoveries] == [["restart"], ["restart"]], trained
