"""Ranks that wait for each other, one of them a newcomer whose limit is minutes: whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rackrun.coordinator.report.run_report import read_report

pytestmark = [pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "deadlock.py"
WITHIN_S = 40.0
"""Every rank says after 10 s that it waits; the rest is for a machine that is slow. A newcomer's first step may take 600 s."""


@pytest.fixture
def play(run_rackrun: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    """``play(what)``: the script, with four ranks and two spares."""

    def run(what: str) -> Any:
        options = ["--standalone", "--nproc-per-node", "6", "--spares", "2"]
        return run_rackrun([*options, SCRIPT, tmp_path, what], timeout=200)

    return run


def longest_s(folder: Path) -> float:
    """Between the beginnings of two steps, whichever they are."""
    times = sorted(float(line.split()[0]) for line in (folder / "times").read_text().splitlines())
    return max(after - before for before, after in pairwise(times))


def recoveries(ran: Any) -> list[Any]:
    return [one.recovery for one in read_report(ran.out_dir / "journal.sqlite").recoveries]


@pytest.mark.parametrize("what", ["calls one more", "calls one more late"])
def test_a_newcomer_and_its_peers_that_wait_for_each_other_are_found_long_before_its_limit(
    what: str, play: Callable[[str], Any], tmp_path: Path
) -> None:
    ran = play(what)
    assert ran.exit_code == 0, ran
    assert longest_s(tmp_path) < WITHIN_S, ran
    assert [len(one.lost) for one in recoveries(ran)] == [1, 0], "the step is done again in place"
    assert "and wait for each other" in recoveries(ran)[1].because, ran


@pytest.mark.parametrize("what", ["computes", "all wait"])
def test_while_some_rank_can_go_on_all_wait_for_it_however_long(
    what: str, play: Callable[[str], Any], tmp_path: Path
) -> None:
    ran = play(what)
    assert ran.exit_code == 0, ran
    assert longest_s(tmp_path) > 19.0, ran
    assert "wait for each other" not in ran.stderr, ran
