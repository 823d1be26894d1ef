"""Sees that a worker is dying before its death is done, and that one has stopped moving.

A killed process becomes readable on its pidfd only after its memory is torn down (tens of milliseconds a gigabyte, seconds
where a GPU pins it). Its lifeline is released before that, and the exiting flag in /proc set; where there is no lifeline
(a program that is no Python script, a worker that is just starting) the flag is polled. A worker that waits in a collective and one that is to
blame look the same from here, so both are told, with how far each has come.
"""

from __future__ import annotations

import asyncio
import time

from rackrun.agent.mirror import Mirror
from rackrun.agent.tray import Tray
from rackrun.agent.uplink import Uplink
from rackrun.agent.worker import Worker
from rackrun.core.events import WorkerStalled
from rackrun.core.ids import Step
from rackrun.link.page import Activity, HeartbeatPage

__all__ = ["Watch"]

_PERIOD_S = 0.1
_POLL_S = 0.01
"""While some worker has no lifeline. Ten times the processor time."""
_LATE_NS = 200_000_000
_SILENCE_NS = 60_000_000_000
"""Of a worker of which nothing is known yet: it may hold the GIL for long, loading or compiling."""


class Watch:
    def __init__(self, tray: Tray, uplink: Uplink, mirror: Mirror, stall_floor_ms: int) -> None:
        self._tray = tray
        self._mirror = mirror
        self._uplink = uplink
        self._floor_ms = stall_floor_ms
        self._loop = asyncio.get_running_loop()
        self._looked_ns = time.monotonic_ns()
        self._not_before_ns = 0
        self._timer = self._loop.call_later(_PERIOD_S, self._look)

    def look_soon(self) -> None:
        """Something has changed: do not sleep it out."""
        self._timer.cancel()
        self._timer = self._loop.call_later(_POLL_S, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > _LATE_NS:
            self._not_before_ns = now_ns  # we were held up, so workers may have been: their time starts again
        self._looked_ns = now_ns
        poll = False
        self._mirror.forget_all_but(self._tray.living())
        for worker in self._tray.living():
            worker.tie(self._tray.look)
            if not worker.tied:
                poll = True
                self._tray.look(worker)
            if not worker.reported:
                self._check_progress(worker, now_ns)
                self._mirror.look(worker)
        self._timer = self._loop.call_later(_POLL_S if poll else _PERIOD_S, self._look)

    def _check_progress(self, worker: Worker, now_ns: int) -> None:
        page = worker.page
        if not page.tick_ns:
            return  # no rackrun in it (yet)
        floor_ns = self._floor_ms * 1_000_000
        silent_ns = now_ns - max(page.tick_ns, worker.stalled_since_ns, self._not_before_ns)
        deadline_ns = max(page.deadline_ms * 1_000_000, floor_ns) if page.deadline_ms > 0 else 0
        if silent_ns > (deadline_ns or _SILENCE_NS) or (silent_ns > floor_ns and worker.stopped()):
            self._tell(worker, now_ns, now_ns - page.tick_ns, silent=True)
        elif deadline_ns and not _waits_for_others(page):
            since_ns = page.since_ns
            if now_ns - max(since_ns, worker.stalled_since_ns, self._not_before_ns) > deadline_ns:
                self._tell(worker, now_ns, now_ns - since_ns, silent=False)

    def _tell(self, worker: Worker, now_ns: int, quiet_ns: int, *, silent: bool) -> None:
        worker.stalled_since_ns = now_ns
        page = worker.page
        self._uplink.event(
            WorkerStalled(
                slot=worker.slot,
                incarnation=worker.incarnation,
                step=Step(page.at.step),
                collective=page.collectives[0],
                silent=silent,
                for_ms=quiet_ns // 1_000_000,
            )
        )


def _waits_for_others(page: HeartbeatPage) -> bool:
    """How long that may take is the coordinator's to say: in a recovery, or in a collective on the way through ``main``."""
    entered, completed = page.collectives
    return page.activity is Activity.RECOVERING or (page.activity is Activity.SETUP and entered > completed)
