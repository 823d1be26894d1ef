"""How much of the spares' waiting time fillers used: metrics during the run, and figures from the journal."""

from __future__ import annotations

import sqlite3
from itertools import groupby

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rackrun.protocol.ids import SlotId, TrayId, tray_of
from rackrun.protocol.wire import FillerState

__all__ = ["FillerMetrics", "FillerUse", "filler_uses"]

_GONE_S = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)


class FillerMetrics:
    """Metrics of fillers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running: dict[SlotId, FillerState] = {}
        self.running = Gauge("rackrun_fillers_running", "Fillers beside spares.", registry=registry)
        self.starts = Counter("rackrun_filler_starts", "Starts of fillers.", registry=registry)
        self.seconds = Counter("rackrun_filler_seconds", "Time that fillers have run.", registry=registry)
        self.cpu_s = Counter("rackrun_filler_cpu_seconds", "Processor time of fillers.", registry=registry)
        self.given_up = Counter("rackrun_fillers_given_up", "Slots that get no filler any more.", registry=registry)
        self.gone_s = Histogram(
            "rackrun_filler_gone_seconds",
            "From when a filler had to go until nobody of it was left.",
            buckets=_GONE_S,
            registry=registry,
        )

    def record_state(self, told: FillerState) -> None:
        """Count a filler's state: starts, seconds and processor time since the last report."""
        before = self._running.pop(told.slot, None)
        if before is None or (before.incarnation, before.start) != (told.incarnation, told.start):
            self.starts.inc()
            before = None
        self.seconds.inc(max(0.0, told.seconds - (before.seconds if before else 0.0)))
        self.cpu_s.inc(max(0.0, told.cpu_s - (before.cpu_s if before else 0.0)))
        if told.state == "running":
            self._running[told.slot] = told
        if told.state == "given up":
            self.given_up.inc()
        if told.gone_s is not None:
            self.gone_s.observe(told.gone_s)
        self.running.set(len(self._running))

    def drop_tray(self, tray: TrayId) -> None:
        """Forget the fillers of a lost tray. They end before its slots are used again."""
        self._running = {slot: told for slot, told in self._running.items() if tray_of(slot) != tray}
        self.running.set(len(self._running))


class FillerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Fillers of one slot over the whole run."""

    slot: SlotId
    starts: int
    restarts: int
    """Number of starts after the filler had ended by itself beside the same spare."""
    seconds: float
    """Total time that fillers ran, in seconds, up to their latest reports."""
    cpu_s: float
    """Processor time of all their processes, in seconds."""
    utilisation: float
    """Average number of processors in use while they ran."""
    had_to_go: int
    """How many times a filler had to end because the spare was needed, or left."""
    gone_s_max: float | None
    """Longest time in seconds from then until none of its processes was left."""
    given_up: str = ""
    """How the filler ended ten times in a row, each time at once; "": it did not."""


def filler_uses(connection: sqlite3.Connection) -> tuple[FillerUse, ...]:
    """Return the use of fillers from a journal, ordered by slot."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'fillers'").fetchone():
        return ()  # an older journal without fillers
    rows = connection.execute("SELECT body FROM fillers ORDER BY slot, incarnation, start")
    told = [msgspec.json.decode(body, type=FillerState) for (body,) in rows]
    return tuple(_use(slot, list(runs)) for slot, runs in groupby(told, key=lambda one: one.slot))


def _use(slot: SlotId, runs: list[FillerState]) -> FillerUse:
    gone = [run.gone_s for run in runs if run.gone_s is not None]
    seconds, cpu_s = sum(run.seconds for run in runs), sum(run.cpu_s for run in runs)
    return FillerUse(
        slot=slot,
        starts=len(runs),
        restarts=len(runs) - len({run.incarnation for run in runs}),
        seconds=seconds,
        cpu_s=cpu_s,
        utilisation=cpu_s / seconds if seconds else 0.0,
        had_to_go=len(gone),
        gone_s_max=max(gone, default=None),
        given_up=next((run.because for run in runs if run.state == "given up"), ""),
    )
