"""A job that may ask a provider for racks, and short ways to say what the provider does."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Command, Decided, Notice, SetTimer
from rackrun.protocol.events import RackDelivered, RackRefused, TimerFired
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import timer_named
from tests.core.core_harness import CoreHarness, only


def begun(
    rules: str = "swap,acquire-wait,shrink",
    *,
    provider: str = "local",
    spares: int = 0,
    provider_expected_s: float | None = None,
) -> CoreHarness:
    """Two trays of two slots, all of which train; with ``spares``, a third for them."""
    config = JobConfig(
        trays_min=2 + bool(spares),
        trays_max=2 + bool(spares),
        spares=spares,
        min_ranks=1,
        no_progress_max=99,
        provider=provider,
        provider_expected_s=provider_expected_s,
        rules=parse_rules(rules),
        acquire_timeout_ms=60_000,
    )
    harness = CoreHarness(config)
    harness.resizes = "in place"
    for tray in ("a", "b", "c")[: config.trays_min]:
        harness.join(tray, 2)
    harness.train()
    return harness


def lose(harness: CoreHarness, tray: str = "b", snapshots: Sequence[int] = (), *, passed: int = 4) -> Sequence[Command]:
    harness.tray_lost(tray)
    return harness.park_all(passed, snapshots=snapshots)


def deliver(harness: CoreHarness, request: int, *trays: str) -> Sequence[Command]:
    return harness.tell(RackDelivered(request=request, trays=tuple(map(TrayId, trays))))


def refuse(
    harness: CoreHarness, request: int = 1, because: str = "no quota", *, failed: bool = False
) -> Sequence[Command]:
    return harness.tell(RackRefused(request=request, because=because, failed=failed))


def is_over(harness: CoreHarness, stage: str, request: int = 1) -> Sequence[Command]:
    """The time of a stage; it comes when the core has said that it would."""
    name = f"rack:{request}:{stage}"
    timer = [command for command in harness.answers if isinstance(command, SetTimer) and str(command.timer) == name][-1]
    harness.now = max(harness.now, timer.at_ms)
    return harness.tell(TimerFired(timer=timer_named(name)))


def said(commands: Sequence[Command]) -> str:
    return "\n".join(command.text for command in commands if isinstance(command, Notice))


def rung(commands: Sequence[Command]) -> Rung:
    return only(Decided, commands).decision.rung


def reason(commands: Sequence[Command]) -> str:
    return only(Decided, commands).decision.reason


def serve(harness: CoreHarness, tray: str = "r", request: int = 1) -> Sequence[Command]:
    """Its trays join, its workers start, take over and train."""
    deliver(harness, request, tray)
    harness.join(tray, 2)
    out = [command for slot in (f"{tray}/0", f"{tray}/1") for command in harness.ready(slot)]
    harness.resume_all()
    return out
