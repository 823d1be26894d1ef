"""A job of two trays whose ranks wait in a hold, and short ways to say what happens to it then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rackrun.core.policy.choice import parse_rules
from rackrun.core.recovery.hold import REMIND_MS
from rackrun.protocol.commands import Answer, Command, Decided
from rackrun.protocol.events import DepartureAnnounced, DrainRequested, PolicyRequested, StopRequested
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from tests.core.core_harness import CoreHarness, every, only

WEEK_MS = 7 * 24 * 3_600_000
STOP = StopRequested(because="rackctl stop", exit_code=143)


def job(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Ranks 0, 1 on a/0, a/1 and 2, 3 on b/0, b/1; the spares wait on a/2 and b/2."""
    given: dict[str, Any] = {"policy_function": policy} if ":" in policy else {"rules": parse_rules(policy)}
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, **given, **options))
    harness.resizes = "in place"
    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    return harness


def held(policy: str = "swap,hold", **options: Any) -> CoreHarness:
    """Tray b is lost with ranks 2 and 3, and one spare is left."""
    harness = job(policy, **options)
    harness.tray_lost("b")
    decided = only(Decided, harness.park_all()).decision
    assert (decided.rung, decided.deadline_s, decided.by) == (Rung.HOLD, 0.0, "order")
    return harness


def remind(harness: CoreHarness) -> Sequence[Command]:
    harness.now += REMIND_MS
    return harness.timer("hold")


def change(harness: CoreHarness, policy: str) -> Sequence[Command]:
    return harness.tell(PolicyRequested(request="p", policy=policy))


def drain(harness: CoreHarness, target: str, *, wait: bool = False) -> list[Answer]:
    return every(Answer, harness.tell(DrainRequested(request="d", target=target, steps=5, wait=wait)))


def depart(harness: CoreHarness, tray: str) -> Sequence[Command]:
    return harness.tell(DepartureAnnounced(tray=TrayId(tray), because="SIGTERM", exit_code=143))


def whose_shards_are_nowhere_else(policy: str, **options: Any) -> CoreHarness:
    """Ranks 0, 1 on a and 2 on b; rank 2 is lost, has left its snapshots, and no GPU of b is fit for another."""
    config = JobConfig(trays_min=2, trays_max=2, spares=1, rules=parse_rules(policy), **options)
    harness = CoreHarness(config)
    harness.join("a", 2)
    harness.join("b", 2)
    harness.train("unique")
    for slot in ("b/0", "b/1"):
        harness.checks(slot, "its memory is bad")
    harness.exits("b/0", snapshots=(3, 4))
    harness.park_all(snapshots=(3, 4))
    for kind in ("park", "owed"):
        harness.now += 60_000
        harness.timer(kind)
    assert harness.view.phase == "parking"
    return harness
