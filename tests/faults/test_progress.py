"""What works is waited for, what hangs is found, and what is done holds nobody: whole jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.report.run_report import read_report

pytestmark = [pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parent / "scripts" / "progress.py"
Play = Callable[..., Any]


@pytest.fixture
def play(run_rackrun: Callable[..., Any], tmp_path: Path) -> Play:
    """``play(what, seconds)``: the script, with three ranks and two spares."""

    def run(what: str, seconds: float) -> Any:
        options = ["--standalone", "--nproc-per-node", "5", "--spares", "2"]
        return run_rackrun([*options, SCRIPT, tmp_path, what, seconds], timeout=500)

    return run


def lost(ran: Any) -> list[int]:
    report = read_report(ran.out_dir / "journal.sqlite")
    return [one.rank for recovery in report.recoveries for one in recovery.recovery.lost]


def test_who_works_between_two_steps_is_waited_for_when_another_is_killed(play: Play) -> None:
    ran = play("busy", 8)
    assert ran.exit_code == 0, ran
    assert lost(ran) == [0], ran


def test_who_hangs_between_two_steps_is_replaced_when_another_is_killed(play: Play) -> None:
    ran = play("hangs", 0)
    assert ran.exit_code == 0, ran
    assert set(lost(ran)) == {0, 1}, ran


@pytest.mark.parametrize(("what", "seconds"), [("save", 6), ("evaluate", 6)])
def test_phases_that_take_far_longer_than_steps_are_done_once(
    what: str, seconds: float, play: Play, tmp_path: Path
) -> None:
    ran = play(what, seconds)
    assert ran.exit_code == 0, ran
    assert not lost(ran), ran
    assert Counter((tmp_path / "told").read_text().splitlines()) == {f"{what} on {rank}": 2 for rank in range(3)}


@pytest.mark.parametrize("what", ["after", "stopped"])
def test_who_is_killed_or_stopped_after_main_is_not_missed(what: str, play: Play) -> None:
    ran = play(what, 2)
    assert ran.exit_code == 0, ran
    assert not lost(ran), ran
    assert "rank 1 had finished training, and is gone" in ran.stderr, ran


@pytest.mark.parametrize("what", ["hangs first", "spins first", "hangs after the loop", "spins after the loop"])
def test_who_hangs_where_it_has_no_history_is_found_by_that_of_the_others(what: str, play: Play) -> None:
    ran = play(what, 0)
    assert ran.exit_code == 0, ran
    assert lost(ran) == [1], ran


def test_when_most_ranks_hang_in_their_own_code_they_are_replaced_and_the_one_that_waits_stays(play: Play) -> None:
    ran = play("most hang", 0)
    assert ran.exit_code == 0, ran
    assert set(lost(ran)) == {1, 2}, ran


def test_who_hangs_in_its_setup_makes_the_world_begin_again(play: Play) -> None:
    ran = play("hangs in setup", 0)
    assert ran.exit_code == 0, ran
    assert "start again" in ran.stderr, ran


@pytest.mark.parametrize("what", ["hangs at exit", "spins at exit"])
def test_who_hangs_after_main_while_all_others_have_ended_holds_nobody(what: str, play: Play) -> None:
    ran = play(what, 0)
    assert ran.exit_code == 0, ran
    assert not lost(ran), ran
    assert "rank 1 had finished training, and is gone" in ran.stderr, ran


def test_who_waits_alone_for_something_and_looks_at_it_is_waited_for(play: Play) -> None:
    ran = play("polls", 45)
    assert ran.exit_code == 0, ran
    assert not lost(ran), ran
