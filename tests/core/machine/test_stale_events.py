"""A stale event changes nothing at all: no decision, no deadline, and no measured cost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rackrun.protocol.events import (
    DeviceChecked,
    DeviceJudged,
    Event,
    ReplicasDiffer,
    SlowRanksChanged,
    SnapshotMirrored,
    TimerFired,
    TrayDescribed,
    TrayLost,
    TrayStoodStill,
    WorkerBusy,
    WorkerExited,
    WorkerParked,
    WorkerPaused,
    WorkerResumed,
    WorkerSevered,
    WorkerStalled,
    WorkerUnbuilt,
)
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import GatherOver, ResumeOver, StallsGathered
from tests.core.core_harness import CoreHarness, verdict_on

FORMER, NOW = Generation(1), Generation(2)
HERE: dict[str, Any] = {"slot": SlotId("a/0"), "incarnation": Incarnation(1)}
GONE: dict[str, Any] = {"slot": SlotId("a/1"), "incarnation": Incarnation(2)}
NOWHERE = TrayId("z")

OF_A_FORMER_GENERATION: list[Event] = [
    WorkerParked(**HERE, generation=FORMER, passed=Position(3), entered=Position(3)),
    WorkerResumed(**HERE, generation=FORMER),
    WorkerPaused(**HERE, generation=FORMER),
    WorkerSevered(**HERE, generation=FORMER, because="connection reset"),
    WorkerUnbuilt(**HERE, generation=FORMER, cut_off=True, because="no route"),
    ReplicasDiffer(**HERE, generation=FORMER, at=Position(3), culprits=(Rank(2),), good=Position(2)),
    SlowRanksChanged(generation=FORMER, slow=(), everybody=2.0),
    *(TimerFired(timer=timer(FORMER)) for timer in (GatherOver, ResumeOver, StallsGathered)),
]
OF_A_FORMER_WORKER: list[Event] = [
    WorkerResumed(**GONE, generation=NOW),
    WorkerStalled(**GONE, step=Step(5), collective=3, silent=True, for_ms=9_000),
    WorkerBusy(**GONE, unit="phase save", where="", for_ms=4_000, allowed_ms=9_000, awaited=True),
    WorkerExited(**GONE, signal=9, exit_code=None, failure=None, step=Step(9)),
    SnapshotMirrored(**GONE, generation=NOW, holder=TrayId("b"), where="b:2/a/1/2", steps=(Step(4),)),
]
OF_A_TRAY_THAT_IS_NOT_THERE: list[Event] = [
    TrayLost(tray=NOWHERE, because="lease lapsed"),
    TrayDescribed(tray=NOWHERE, topology=b""),
    DeviceJudged(tray=NOWHERE, verdict=verdict_on(0, Health.LOST)),
    DeviceChecked(tray=NOWHERE, index=0, unfit=("ECC errors",)),
    TrayStoodStill(tray=NOWHERE, for_ms=4_000),
]


@pytest.fixture
def second_generation() -> CoreHarness:
    """Ranks 0 to 3 on a and b; a/1 was lost, and its rank went to c."""
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=2))
    for tray in "abc":
        harness.join(tray, 2)
    harness.train()
    harness.exits("a/1")
    harness.park_all(passed=4)
    assert harness.view.generation == NOW
    return harness


@pytest.mark.parametrize(
    "then", [lambda told: None, CoreHarness.resume_all], ids=["while all resume", "while all train"]
)
@pytest.mark.parametrize(
    "event",
    [*OF_A_FORMER_GENERATION, *OF_A_FORMER_WORKER, *OF_A_TRAY_THAT_IS_NOT_THERE],
    ids=lambda event: type(event).__name__,
)
def test_a_stale_event_changes_nothing(
    second_generation: CoreHarness, event: Event, then: Callable[[CoreHarness], object]
) -> None:
    then(second_generation)
    before = pickle.dumps(second_generation.core._job)
    assert not second_generation.tell(event)
    assert pickle.dumps(second_generation.core._job) == before


def test_a_tray_that_is_lost_twice_is_repaired_from_its_first_loss_on(second_generation: CoreHarness) -> None:
    told = second_generation
    told.resume_all()
    told.now = 1_000
    told.tray_lost("c", returns=True)
    told.now = 21_000
    told.tray_lost("c")
    told.now = 41_000
    told.join("c", 2)
    assert told.core._job.cost_meter.costs(0).repair_s == 40.0
