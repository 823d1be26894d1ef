"""Metrics for Prometheus, in a registry of their own, so that several jobs in one process stay separate."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackrun.coordinator.observe.copy_metrics import CopyMetrics
from rackrun.coordinator.observe.filler_usage import FillerMetrics
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.observe.slow_ranks import SlowMetrics
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.events import Event, ReplicasDiffer
from rackrun.protocol.ids import Generation

__all__ = ["Metrics"]

_FAST_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_RECOVERY_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one job."""

    def __init__(self, run_id: str, plan: Callable[[], GenerationPlan | None]) -> None:
        self.registry = CollectorRegistry()
        info = Gauge("rackrun_job", "Always 1; its label names the run.", ["run_id"], registry=self.registry)
        info.labels(run_id).set(1)
        self.events = Counter("rackrun_events", "Events handled by the core.", ["event"], registry=self.registry)
        self.handle_s = Histogram(
            "rackrun_handle_seconds",
            "From the arrival of an event until its commands are on their way.",
            buckets=_FAST_S,
            registry=self.registry,
        )
        self.persist_s = Histogram(
            "rackrun_persist_seconds", "Writing a generation to disk.", buckets=_FAST_S, registry=self.registry
        )
        self.recoveries = Counter("rackrun_recoveries", "Recoveries, by kind.", ["kind"], registry=self.registry)
        self.recovery_s = Histogram(
            "rackrun_recovery_seconds",
            "From the first event of a failure until every rank computed again, without the time of a hold.",
            buckets=_RECOVERY_S,
            registry=self.registry,
        )
        self.held_s = Counter(
            "rackrun_held_seconds", "Time that all ranks waited in holds that are over.", registry=self.registry
        )
        self.generation = Gauge("rackrun_generation", "The newest generation announced.", registry=self.registry)
        self.world_size = Gauge("rackrun_world_size", "Ranks in that generation.", registry=self.registry)
        self.step = Gauge("rackrun_step", "The newest step that every rank has committed.", registry=self.registry)
        self.steps_redone = Counter("rackrun_steps_redone", "Steps computed again.", registry=self.registry)
        self.corruptions = Counter(
            "rackrun_corruptions", "Times that replicas differed.", ["blamed"], registry=self.registry
        )
        self._differed = Generation(0)
        self._events: dict[type[Event], Counter] = {}
        self.trays = Gauge("rackrun_trays", "Agents connected.", registry=self.registry)
        self.copies = CopyMetrics(self.registry, plan)
        self.fillers = FillerMetrics(self.registry)
        self.slow = SlowMetrics()
        self.registry.register(self.slow)

    def record_recovery(self, recovery: RecoveryRecord) -> None:
        if not recovery.ended_with_job:
            self.recoveries.labels(recovery.kind).inc()
        self.steps_redone.inc(len(recovery.redone))
        self.copies.record_recovery(recovery)
        self.held_s.inc(recovery.held_ms / 1e3)
        if recovery.seconds is not None:
            self.recovery_s.observe(max(recovery.seconds - recovery.held_ms / 1e3, 0.0))

    def record_event(self, event: Event) -> None:
        self.copies.record_event(event)
        counter = self._events.get(type(event))
        if counter is None:
            counter = self._events[type(event)] = self.events.labels(type(event).__name__)
        counter.inc()
        if isinstance(event, ReplicasDiffer) and event.generation != self._differed:  # all ranks report it
            self._differed = event.generation
            self.corruptions.labels("yes" if event.culprits else "no").inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
