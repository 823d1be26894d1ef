"""Measure the processor time of the core alone, in `ControlPlane.handle`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from rackrun.chaos.simulator.instant_workers import InstantWorkers
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.events import DrainRequested, TimerFired, TrayLost, WorkerSevered
from rackrun.protocol.ids import Generation, Step, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import ResumeOver

__all__ = ["STORIES", "Cost", "Scenario", "instant_workers_of", "measure", "play"]

SLOTS = 4
TRIES = 5
"""Runs of each measurement, of which the fastest counts: other work on the machine can only add time."""
_TIMER = "an old timer"
AT_ONCE = 16
"""Where many ranks are lost at once, one rank in this many is lost."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The processor time of a number of events."""

    what: str
    events: int
    cpu_s: float

    def __str__(self) -> str:
        each = f"{self.cpu_s / self.events * 1e6:.1f} us each, {self.events / self.cpu_s:,.0f} a second"
        return f"{self.what}: {self.events} events in {self.cpu_s:.3f} s of processor time ({each})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario of a job that trains."""

    tell: Callable[[InstantWorkers], None]
    before: Callable[[InstantWorkers], None] = lambda crowd: crowd.train()
    """What happens before the measurement."""
    own: bool = False
    """Whether each rank's shard is its own, so that no rank has a replica."""
    spares: bool = True
    """One spare on each tray; otherwise there are none, and a lost worker starts again."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields of `JobConfig`."""
    ends: str = "training"


def _one(crowd: InstantWorkers) -> None:
    crowd.settle([crowd.killed(crowd.rank(len(crowd.workers) // 2))])


def _many(crowd: InstantWorkers) -> None:
    """Many ranks are lost at once; the workers that replace them start one after the other in their slots."""
    crowd.settle([crowd.killed(worker) for worker in crowd.workers[::AT_ONCE]])


def _a_tray(crowd: InstantWorkers) -> None:
    tray = tray_of(crowd.rank(len(crowd.workers) // 2).slot)
    crowd.settle([TrayLost(at_ms=crowd.at_ms, tray=tray, because="its lease lapsed")])


def _nobody(crowd: InstantWorkers) -> None:
    first = crowd.rank(0)
    assert crowd.plan is not None
    crowd.settle(
        [
            WorkerSevered(
                at_ms=crowd.at_ms,
                slot=first.slot,
                incarnation=first.incarnation,
                generation=crowd.plan.generation,
                because="connection reset",
            )
        ]
    )


def _with_copies(crowd: InstantWorkers) -> None:
    crowd.train()
    crowd.submit(crowd.copied((Step(crowd.done - 7), Step(crowd.done))))


def _with_old_copies(crowd: InstantWorkers) -> None:
    crowd.train()
    crowd.submit(crowd.copied((Step(crowd.done - 7), Step(crowd.done))))
    crowd.train(1)


def _with_parity(crowd: InstantWorkers) -> None:
    crowd.train()
    crowd.submit(crowd.striped(Step(crowd.done)))


def _drain(crowd: InstantWorkers) -> None:
    """A whole tray is drained; then all snapshots are copied to other trays, and the tray is empty."""
    tray = tray_of(crowd.rank(0).slot)
    crowd.settle([DrainRequested(at_ms=crowd.at_ms, request="drain", target=tray, wait=True, steps=crowd.done)])
    crowd.train()
    crowd.settle(crowd.copied((Step(crowd.done),)))


def _copies(crowd: InstantWorkers) -> None:
    crowd.submit(crowd.copied((Step(crowd.done),)))


def _end(crowd: InstantWorkers) -> None:
    crowd.settle(crowd.finished())


_SHRINK = parse_rules("shrink,wait")
STORIES: Mapping[str, Scenario] = {
    "everybody's snapshot is copied": Scenario(tell=_copies),
    "one is lost and replaced": Scenario(tell=_one),
    "many are lost, and wait for others to start": Scenario(tell=_many, spares=False),
    "a tray is lost, its ranks restored from copies": Scenario(tell=_a_tray, before=_with_copies, own=True),
    "a tray is lost, and all go back": Scenario(tell=_a_tray, before=_with_old_copies, own=True),
    "the same, from parity": Scenario(tell=_a_tray, before=_with_parity, own=True, options={"snapshot_copies": "xor"}),
    "many are lost, and the others go on": Scenario(
        tell=_many, spares=False, options={"min_ranks": 1, "rules": _SHRINK}
    ),
    "a connection breaks, nobody is lost": Scenario(tell=_nobody),
    "a tray is drained": Scenario(tell=_drain, before=_with_copies),
    "all finish": Scenario(tell=_end, before=_with_copies, ends="stopped"),
}


def instant_workers_of(
    ranks: int, story: Scenario | None = None, clock: Callable[[], float] = time.process_time
) -> InstantWorkers:
    """Return a job of this many ranks that has begun and trains."""
    story = story or STORIES["one is lost and replaced"]
    training = SLOTS - 1 if story.spares else SLOTS
    trays = -(-ranks // training)
    options = {"trays_min": trays, "trays_max": trays, "spares": trays * SLOTS - ranks, **story.options}
    config = msgspec.convert(options, JobConfig)
    crowd = InstantWorkers(trays, SLOTS, config, own=story.own, clock=clock)
    assert crowd.core.view().phase == "training"
    return crowd


def play(ranks: int, name: str, clock: Callable[[], float] = time.process_time) -> Cost:
    """Measure one of `STORIES` with this many ranks."""
    story = STORIES[name]
    crowd = instant_workers_of(ranks, story, clock)
    story.before(crowd)
    crowd.forget_costs()
    story.tell(crowd)
    phase = crowd.core.view().phase
    assert phase == story.ends, f"{name}: {phase}"
    return Cost(f"{ranks} ranks, {name}", crowd.events, crowd.cpu_s)


def measure(ranks: int, *, repeats: int = 20_000, clock: Callable[[], float] = time.process_time) -> list[Cost]:
    """Measure the start, an old timer and all stories for a job of ``ranks``, and return the costs, with their sum
    last."""
    crowd = min((instant_workers_of(ranks, clock=clock) for _ in range(TRIES)), key=lambda begun: begun.cpu_s)
    found = [Cost(f"{ranks} ranks begin", crowd.events, crowd.cpu_s)]
    crowd.forget_costs()
    crowd.submit([TimerFired(timer=ResumeOver(Generation(0)))] * repeats)
    found.append(Cost(f"{ranks} ranks, {_TIMER}", crowd.events, crowd.cpu_s))
    for name in STORIES:
        tries = [play(ranks, name, clock) for _ in range(TRIES)]
        found.append(min(tries, key=lambda cost: cost.cpu_s))
    told = [cost for cost in found if not cost.what.endswith(_TIMER)]
    events, cpu_s = sum(cost.events for cost in told), sum(cost.cpu_s for cost in told)
    return [*found, Cost(f"{ranks} ranks, all of these but the timer", events, cpu_s)]
