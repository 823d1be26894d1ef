"""Sees that a worker is dying before its death is done, and that one has stopped moving.

A killed process becomes readable on its pidfd only after its memory is torn down (tens of milliseconds a gigabyte, seconds
where a GPU pins it). Its lifeline is released before that, and the exiting flag in /proc set; where there is no lifeline
(a program that is no Python script, a worker that is just starting) the flag is polled. A worker that waits in a collective and one that is to
blame look the same from here, so both are told, with how far each has come.
"""

from __future__ import annotations

import asyncio
import time

from rackrun.agent.tray import Tray
from rackrun.agent.uplink import Uplink
from rackrun.agent.worker import Worker
from rackrun.core.events import WorkerStalled
from rackrun.core.ids import Step
from rackrun.link.page import Activity

__all__ = ["Watch"]

_PERIOD_S = 0.1
_POLL_S = 0.01
"""While some worker has no lifeline. Ten times the processor time."""
_LATE_NS = 200_000_000


class Watch:
    def __init__(self, tray: Tray, uplink: Uplink, stall_floor_ms: int) -> None:
        self._tray = tray
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
        for worker in self._tray.living():
            worker.tie(self._tray.look)
            if not worker.tied:
                poll = True
                self._tray.look(worker)
            if not worker.reported:
                self._check_progress(worker, now_ns)
        self._timer = self._loop.call_later(_POLL_S if poll else _PERIOD_S, self._look)

    def _check_progress(self, worker: Worker, now_ns: int) -> None:
        page = worker.page
        deadline_ms = page.deadline_ms
        if deadline_ms <= 0:
            return
        deadline_ns = max(deadline_ms, self._floor_ms) * 1_000_000
        since_ns = page.since_ns
        quiet_ns = now_ns - since_ns
        if now_ns - max(since_ns, worker.stalled_since_ns, self._not_before_ns) <= deadline_ns:
            return
        silent = now_ns - page.tick_ns > deadline_ns
        if not silent and page.activity is Activity.RECOVERING:
            return  # it waits for others; how long a recovery may take is the coordinator's to say
        worker.stalled_since_ns = now_ns
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
