"""Costs measured in this job, from events and commands and from the coordinator's own measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rackrun.protocol.commands import Command, GenerationPlan, ReleaseRack, RequestRack, ResumeGeneration, StartWorker
from rackrun.protocol.events import (
    CostsMeasured,
    Event,
    RackDelivered,
    TrayJoined,
    TrayLost,
    WorkerReady,
    WorkerResumed,
)
from rackrun.protocol.ids import Incarnation, SlotId, TrayId
from rackrun.protocol.policy_types import Costs, Priors

__all__ = ["MEASURED", "CostMeter"]

SAMPLES = 5
"""Number of latest samples whose median is a cost."""


MEASURED = frozenset((WorkerResumed, WorkerReady, CostsMeasured, TrayLost, TrayJoined, RackDelivered))
"""Types of events from which costs are measured; `measure_event` ignores all others."""


def _few() -> deque[float]:
    return deque(maxlen=SAMPLES)


@dataclass(slots=True)
class CostMeter:
    """Measures costs from all events and commands that it is given. It decides nothing."""

    recoveries: int = 0
    """Number of plans since the first generation."""
    _told: CostsMeasured = field(default_factory=CostsMeasured)
    _start_s: deque[float] = field(default_factory=_few)
    _regroup_s: deque[float] = field(default_factory=_few)
    _takeover_s: deque[float] = field(default_factory=_few)
    _repair_s: deque[float] = field(default_factory=_few)
    _starting: dict[SlotId, tuple[Incarnation, int]] = field(default_factory=dict)
    _acquire_s: deque[float] = field(default_factory=_few)
    _asked_ms: dict[int, int] = field(default_factory=dict)
    """Times of requests for racks that have not come, by request."""
    _joined_ms: dict[TrayId, int] = field(default_factory=dict)
    """Trays that joined since the oldest of these requests, and when."""
    _delivered: dict[int, tuple[TrayId, ...]] = field(default_factory=dict)
    _lost_ms: dict[TrayId, int] = field(default_factory=dict)
    _plan: GenerationPlan | None = None
    _planned_ms: int = 0
    _waiting: dict[tuple[SlotId, Incarnation], None] = field(default_factory=dict)
    """Members of the plan that have not resumed yet."""

    def measure_event(self, event: Event) -> None:
        """Measure from an event."""
        if type(event) not in MEASURED:
            return
        match event:
            case WorkerResumed():
                self._resumed(event)
            case WorkerReady():
                self._ready(event)
            case CostsMeasured():
                self._told = event
            case TrayLost():
                self._lost_ms.setdefault(event.tray, event.at_ms)
            case TrayJoined():
                if event.tray in self._lost_ms:
                    self._repair_s.append((event.at_ms - self._lost_ms.pop(event.tray)) / 1e3)
                if self._asked_ms:
                    self._joined_ms[event.tray] = event.at_ms
                    self._acquired()
            case RackDelivered() if event.request in self._asked_ms:
                self._delivered[event.request] = event.trays
                self._acquired()
            case _:
                pass

    def measure_commands(self, commands: Sequence[Command], at_ms: int) -> None:
        """Measure from the commands that the core emitted at ``at_ms``."""
        for command in commands:
            match command:
                case StartWorker():
                    self._starting[command.slot] = (command.incarnation, at_ms)
                case ResumeGeneration():
                    self.recoveries += self._plan is not None
                    self._plan, self._planned_ms = command.plan, at_ms
                    self._waiting = dict.fromkeys((member.slot, member.incarnation) for member in command.plan.members)
                case RequestRack():
                    self._asked_ms[command.request] = at_ms
                case ReleaseRack():
                    self._forget(command.request)
                case _:
                    pass

    def costs(self, step: int, trusted: int | None = None) -> Costs:
        """Return the measured costs.

        ``step`` is the last committed step. ``trusted``: checkpoints of later steps are of no use.
        """
        told = self._told
        age_s = None
        if told.checkpoint is not None:
            usual_s = Priors().step_s if told.step_s is None else told.step_s
            newest = told.checkpoint if trusted is None else min(told.checkpoint, trusted)
            age_s = max(step - newest, 0) * usual_s
        return Costs(
            step_s=told.step_s,
            regroup_s=_usual(self._regroup_s),
            takeover_s=_usual(self._takeover_s),
            copy_bytes_per_s=told.copy_bytes_per_s,
            state_bytes=told.state_bytes,
            start_s=_usual(self._start_s),
            repair_s=_usual(self._repair_s),
            acquire_s=_usual(self._acquire_s),
            checkpoint_age_s=age_s,
            checkpoint_every_s=told.checkpoint_every_s,
        )

    def _acquired(self) -> None:
        """Measure requests whose rack has come: the first of its trays has joined. The provider may name its trays
        before or after that."""
        for request, trays in list(self._delivered.items()):
            came_ms = [self._joined_ms[tray] for tray in trays if tray in self._joined_ms]
            if came_ms:
                self._acquire_s.append(max(min(came_ms) - self._asked_ms[request], 0) / 1e3)
                self._forget(request)

    def _forget(self, request: int) -> None:
        self._asked_ms.pop(request, None)
        self._delivered.pop(request, None)
        if not self._asked_ms:
            self._joined_ms.clear()

    def _ready(self, event: WorkerReady) -> None:
        incarnation, since_ms = self._starting.get(event.slot, (None, 0))
        if incarnation == event.incarnation:
            del self._starting[event.slot]
            self._start_s.append((event.at_ms - since_ms) / 1e3)

    def _resumed(self, event: WorkerResumed) -> None:
        plan = self._plan
        if plan is None or event.generation != plan.generation or not self._waiting:
            return
        self._waiting.pop((event.slot, event.incarnation), None)
        if not self._waiting:
            restored = bool(plan.restores) or plan.rollback is not None
            (self._takeover_s if restored else self._regroup_s).append((event.at_ms - self._planned_ms) / 1e3)


def _usual(samples: Sequence[float]) -> float | None:
    return median(samples) if samples else None
