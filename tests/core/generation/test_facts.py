"""Facts are acted on after the part that found them: what must be true then, and what must not be acted on any more."""

from __future__ import annotations

import pytest

from rackrun.protocol.commands import FenceWorker, StartWorker, StopJob
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, stop_in


def short_of_spares(*, start_over: bool) -> CoreHarness:
    """Two of three ranks are lost, and one spare is ready: another one starts, and never comes."""
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=1, join_timeout_ms=60_000, start_over=start_over))
    harness.join("a", 4)
    harness.train()
    harness.now = 1_000
    harness.exits("a/0")
    harness.exits("a/1")
    assert every(StartWorker, harness.park_all())
    harness.now = 61_000
    return harness


def test_where_nothing_comes_in_time_the_world_begins_again_if_it_may() -> None:
    harness = short_of_spares(start_over=True)
    answers = harness.timer("recover")
    assert (harness.view.phase, harness.view.restarts) == ("restarting", 1)
    assert not every(StopJob, answers)
    assert len(every(FenceWorker, answers)) == 3


def test_where_nothing_comes_in_time_and_it_may_not_the_job_ends() -> None:
    harness = short_of_spares(start_over=False)
    assert "was not recovered within 60000 ms" in stop_in(harness.timer("recover")).because


@pytest.mark.parametrize("later", [[], [Health.OK]], ids=["it stays so", "it recovers"])
@pytest.mark.parametrize("clique", ["", "c"], ids=["no topology", "a topology"])
def test_a_verdict_from_before_the_world_forms_strikes_nobody_who_starts_later(
    clique: str, later: list[Health]
) -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=1, max_restarts=0))
    harness.join("a", 2, clique=clique)
    for health in (Health.RESET, *later):
        harness.judges("a/0", health)
    answers = harness.join("b", 2, clique=clique)
    assert harness.view.phase == "setup"
    assert not every(FenceWorker, answers)
