"""Fixtures of the core's tests: a rack that has formed, and one that trains."""

from __future__ import annotations

import os

import pytest

from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness

LARGE = os.environ.get("RACKRUN_HYPOTHESIS") == "large"
STORMS = [range(20_000)] if LARGE else [range(200), pytest.param(range(200, 400), marks=pytest.mark.stories)]


@pytest.fixture(params=STORMS, ids=lambda seeds: f"{seeds.start} to {seeds.stop}")
def seeds(request: pytest.FixtureRequest) -> range:
    """Of storms: some for everybody, others for those who have the time."""
    found: range = request.param
    return found


@pytest.fixture
def rack() -> CoreHarness:
    """Two trays of three slots, two spares: ranks 0, 1 on a/0, a/1 and 2, 3 on b/0, b/1; a/2 and b/2 wait."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 3)
    harness.join("b", 3)
    return harness


@pytest.fixture
def training(rack: CoreHarness) -> CoreHarness:
    rack.train()
    return rack
