"""What the core itself costs: processor time of `ControlPlane.handle`, and of nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from rackrun.chaos.simulator.instant_workers import Crowd
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.events import DrainRequested, TimerFired, TrayLost, WorkerSevered
from rackrun.protocol.ids import Step, tray_of
from rackrun.protocol.job_config import JobConfig

__all__ = ["STORIES", "Cost", "Story", "crowd_of", "measure", "play"]

SLOTS = 4
TRIES = 5
"""The fastest counts: what else the machine does only adds to it."""
_TIMER = "an old timer"
AT_ONCE = 16
"""One rank of so many, where very many are lost at once."""


@dataclass(frozen=True, slots=True)
class Cost:
    what: str
    events: int
    cpu_s: float

    def __str__(self) -> str:
        each = f"{self.cpu_s / self.events * 1e6:.1f} us each, {self.events / self.cpu_s:,.0f} a second"
        return f"{self.what}: {self.events} events in {self.cpu_s:.3f} s of processor time ({each})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Of a job that trains."""

    tell: Callable[[Crowd], None]
    before: Callable[[Crowd], None] = lambda crowd: crowd.train()
    """Not measured."""
    own: bool = False
    """Each rank's shard is its own."""
    spares: bool = True
    """One a tray; else none, and who is lost starts again."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of `JobConfig`."""
    ends: str = "training"


def _one(crowd: Crowd) -> None:
    crowd.settle([crowd.killed(crowd.rank(len(crowd.workers) // 2))])


def _many(crowd: Crowd) -> None:
    """Spares start one after the other, in the places of the lost."""
    crowd.settle([crowd.killed(worker) for worker in crowd.workers[::AT_ONCE]])


def _a_tray(crowd: Crowd) -> None:
    tray = tray_of(crowd.rank(len(crowd.workers) // 2).slot)
    crowd.settle([TrayLost(at_ms=crowd.at_ms, tray=tray, because="its lease lapsed")])


def _nobody(crowd: Crowd) -> None:
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


def _with_copies(crowd: Crowd) -> None:
    crowd.train()
    crowd.tell(crowd.copied((Step(crowd.done - 7), Step(crowd.done))))


def _with_old_copies(crowd: Crowd) -> None:
    crowd.train()
    crowd.tell(crowd.copied((Step(crowd.done - 7), Step(crowd.done))))
    crowd.train(1)


def _with_parity(crowd: Crowd) -> None:
    crowd.train()
    crowd.tell(crowd.striped(Step(crowd.done)))


def _drain(crowd: Crowd) -> None:
    """A whole tray; then everybody has new copies elsewhere, and it is empty."""
    tray = tray_of(crowd.rank(0).slot)
    crowd.settle([DrainRequested(at_ms=crowd.at_ms, request="drain", target=tray, wait=True, steps=crowd.done)])
    crowd.train()
    crowd.settle(crowd.copied((Step(crowd.done),)))


def _copies(crowd: Crowd) -> None:
    crowd.tell(crowd.copied((Step(crowd.done),)))


def _end(crowd: Crowd) -> None:
    crowd.settle(crowd.finished())


_SHRINK = parse_rules("shrink,wait")
STORIES: Mapping[str, Story] = {
    "everybody's snapshot is copied": Story(tell=_copies),
    "one is lost and replaced": Story(tell=_one),
    "many are lost, and wait for others to start": Story(tell=_many, spares=False),
    "a tray is lost, its ranks restored from copies": Story(tell=_a_tray, before=_with_copies, own=True),
    "a tray is lost, and all go back": Story(tell=_a_tray, before=_with_old_copies, own=True),
    "the same, from parity": Story(tell=_a_tray, before=_with_parity, own=True, options={"snapshot_copies": "xor"}),
    "many are lost, and the others go on": Story(tell=_many, spares=False, options={"min_ranks": 1, "rules": _SHRINK}),
    "a connection breaks, nobody is lost": Story(tell=_nobody),
    "a tray is drained": Story(tell=_drain, before=_with_copies),
    "all finish": Story(tell=_end, before=_with_copies, ends="stopped"),
}


def crowd_of(ranks: int, story: Story | None = None, clock: Callable[[], float] = time.process_time) -> Crowd:
    """It has begun, and trains."""
    story = story or STORIES["one is lost and replaced"]
    training = SLOTS - 1 if story.spares else SLOTS
    trays = -(-ranks // training)
    options = {"trays_min": trays, "trays_max": trays, "spares": trays * SLOTS - ranks, **story.options}
    config = msgspec.convert(options, JobConfig)
    crowd = Crowd(trays, SLOTS, config, own=story.own, clock=clock)
    assert crowd.core.view().phase == "training"
    return crowd


def play(ranks: int, name: str, clock: Callable[[], float] = time.process_time) -> Cost:
    """One of `STORIES`."""
    story = STORIES[name]
    crowd = crowd_of(ranks, story, clock)
    story.before(crowd)
    crowd.forget_costs()
    story.tell(crowd)
    phase = crowd.core.view().phase
    assert phase == story.ends, f"{name}: {phase}"
    return Cost(f"{ranks} ranks, {name}", crowd.events, crowd.cpu_s)


def measure(ranks: int, *, repeats: int = 20_000, clock: Callable[[], float] = time.process_time) -> list[Cost]:
    """Of a job of ``ranks``."""
    crowd = min((crowd_of(ranks, clock=clock) for _ in range(TRIES)), key=lambda begun: begun.cpu_s)
    found = [Cost(f"{ranks} ranks begin", crowd.events, crowd.cpu_s)]
    crowd.forget_costs()
    crowd.tell([TimerFired(name="resume:0")] * repeats)
    found.append(Cost(f"{ranks} ranks, {_TIMER}", crowd.events, crowd.cpu_s))
    for name in STORIES:
        tries = [play(ranks, name, clock) for _ in range(TRIES)]
        found.append(min(tries, key=lambda cost: cost.cpu_s))
    told = [cost for cost in found if not cost.what.endswith(_TIMER)]
    events, cpu_s = sum(cost.events for cost in told), sum(cost.cpu_s for cost in told)
    return [*found, Cost(f"{ranks} ranks, all of these but the timer", events, cpu_s)]
