"""`ControlPlane`, the core's entry point: events in, commands out, and a view of the job for status pages.

Everything here is a pure function of the configuration and the events so far. The time is ``event.at_ms``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.core.machine.apply import apply
from rackrun.core.machine.job import CoreParts
from rackrun.core.machine.rules import advance
from rackrun.core.machine.view import RankView, SpareView, TrayView, View, view_of
from rackrun.protocol.commands import Command, SetTimer
from rackrun.protocol.events import Event, TimerFired
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import JobBegins, JoinOver

__all__ = ["ControlPlane", "RankView", "SpareView", "TrayView", "View"]


class ControlPlane:
    """The core of one job, driven by `handle`."""

    def __init__(self, config: JobConfig) -> None:
        self._began = False
        self._config = config
        self._job = CoreParts(config)
        self._rack = self._job.rack

    def begin(self, at_ms: int) -> Sequence[Command]:
        """Start the job's time: trays may join from now on. Without this call, the first event does it."""
        return self.handle(TimerFired(timer=JobBegins(), at_ms=at_ms))

    def handle(self, event: Event) -> Sequence[Command]:
        """Return the commands that follow from ``event``, in order. Events that are too early or too late are
        ignored."""
        job = self._job
        if not self._began:
            self._began = True
            job.out.rule = JobBegins.__name__
            job.out.emit(SetTimer(timer=JoinOver(), at_ms=event.at_ms + self._config.join_timeout_ms))
        job.rack.now_ms = event.at_ms
        if apply(job, event):
            advance(job, event.at_ms)
        commands = job.out.take()
        if commands:
            job.cost_meter.measure_commands(commands, event.at_ms)
        return commands

    @property
    def sent_by(self) -> Sequence[str]:
        """The rules that sent the commands of the last event that led to any, one for each command, in their order.
        A rule has the name that it has in its table: a type of event, timer or fact, or a condition of `RULES`
        (`rackrun.core.machine.rules`)."""
        return self._job.out.sent_by

    def view(self) -> View:
        """Return the job as a status page shows it."""
        return view_of(self._job)

    def check_invariants(self) -> None:
        """Raise AssertionError if the core contradicts itself. Tests call it after every event."""
        self._job.check_invariants()
