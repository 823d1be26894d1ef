"""Detection of dying workers before their death is complete, and of workers without progress.

A killed process becomes readable on its pidfd only after its memory is torn down (tens of milliseconds per gigabyte,
seconds if a GPU pins it). Its robust mutex is released before that, and the exiting flag in /proc is set. If there is
no such mutex (a program that is no Python script, a worker that is just starting), the flag is polled.

A worker without progress waits for others in a collective, or is in its own code. Both are reported when their time is
over, with how far each has come and where it is; and again when it makes progress after all. If a worker's history says
too little, an idle worker is reported early, and so are those that wait, so that they can be compared
(`rackrun.core.faults.peer_times`) and a deadlock is found (`rackrun.core.faults.deadlock`). In its own code a worker
may be working; then it has more time, except in steps (`rackrun.agent.workers.hang_detector`).

No worker is blamed for time in which this agent did not run. If it stood still for long, that is reported too
(`rackrun.agent.workers.standstill`).
"""

from __future__ import annotations

import asyncio
import time

from rackrun.agent.snapshots.mirror import Mirror
from rackrun.agent.tray.tray import TrayAgent
from rackrun.agent.tray.uplink import Uplink
from rackrun.agent.workers.hang_detector import AgentPauses, ProgressTimer
from rackrun.agent.workers.process_activity import frozen, read_signs, where_in_kernel
from rackrun.agent.workers.standstill import main_thread_ns, read_moment, stood_still_ns, workers_ran
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.protocol.events import WorkerBusy, WorkerStalled
from rackrun.protocol.ids import Step, after_step

__all__ = ["LivenessWatch"]

_PERIOD_S = 0.1
_POLL_S = 0.01
"""Seconds between polls while some worker has no robust mutex."""
_LATE_NS = 200_000_000
_SILENCE_NS, _BUSY_SILENCE_NS = 60_000_000_000, 600_000_000_000
"""Longest time without a tick of the control thread if no shorter deadline applies, because the interpreter's lock may
be held for long; the second value holds while the worker works."""
_LOOK_NS = (90_000_000, 1_000_000_000)
"""Shortest and longest time between looks at a process whose time is running out."""
_PLAIN_STOPPED_NS, _PLAIN_LOOK_NS = 3_000_000_000, 500_000_000
"""A process that reports nothing is given up after it has been stopped for this long."""
_COMES_NS, _COMES_AGAIN_NS = 1_000_000_000, 4_000_000_000
"""Time after the call to another generation until a missing worker is reported, and between further reports."""
_UNITS = (Activity.STEP, Activity.PHASE)
_WAITS_NS = 10_000_000_000
"""A worker that has waited in a collective for this long reports how long its own code took before it, and in what it
is blocked, whatever its limit."""
_SEEN_FROM_NS = 2_000_000_000
"""Time without progress after which a worker that may be compared is looked at. Its idle time counts from the first
look that finds it without signs of life."""
_IDLE_AGAIN_NS = 5_000_000_000
"""Time between reports of an idle worker."""
_REPEATS_MAX = 6
"""The time between reports of a stopped worker doubles with each of them, this many times at most."""
_MS = 1_000_000


class LivenessWatch:
    """Looks at all workers of a tray regularly and reports those that die or make no progress."""

    def __init__(self, tray: TrayAgent, uplink: Uplink, mirror: Mirror, stall_floor_ms: int) -> None:
        self._tray = tray
        self._mirror = mirror
        self._uplink = uplink
        self._floor_ms = stall_floor_ms
        self._loop = asyncio.get_running_loop()
        self._looked_ns = time.monotonic_ns()
        self._agent_pauses = AgentPauses()
        self._moment = read_moment()
        self._signs = dict[WorkerHandle, tuple[int, int]]()
        self._timer = self._loop.call_later(_PERIOD_S, self._check_all)

    def check_soon(self) -> None:
        """Look again soon, because something has changed."""
        self._timer.cancel()
        self._timer = self._loop.call_later(_POLL_S, self._check_all)

    def close(self) -> None:
        self._timer.cancel()

    def _check_all(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > _LATE_NS:
            self._agent_pauses.add(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        self._look_at_itself()
        poll = False
        self._mirror.cancel_all_but(self._tray.living())
        for worker in self._tray.living():
            worker.tie(self._tray.check_end)
            if not worker.tied:
                poll = True
                self._tray.check_end(worker)
            if not worker.reported:
                self._check_progress(worker, now_ns)
                self._mirror.update(worker)
        self._timer = self._loop.call_later(_POLL_S if poll else _PERIOD_S, self._check_all)

    def _look_at_itself(self) -> None:
        """Tell the tray if the agent stood still since the last look."""
        before, self._moment = self._moment, read_moment()
        signs, self._signs = (
            self._signs,
            {one: (one.page.ticks, main_thread_ns(one.pid)) for one in self._tray.living()},
        )
        if stood_ns := stood_still_ns(before, self._moment, round(_PERIOD_S * 1e9)):
            ran = workers_ran(signs, self._signs, stood_ns)
            self._tray.stood_still(stood_ns // _MS, workers_ran=ran)

    def _check_progress(self, worker: WorkerHandle, now_ns: int) -> None:
        page, held_ns = worker.page, self._agent_pauses.total_ns
        if not page.tick_ns:
            self._check_plain(worker, now_ns)
            return
        timer, silence = worker.progress_timer, worker.silence
        if page.since_ns != timer.since_ns:
            if timer.reported:
                timer.reported = False
                self._uplink.event(_stall(worker, over=True))
            timer.restart(page.since_ns, self._agent_pauses.by(page.since_ns))
        if page.tick_ns != silence.since_ns:
            if silence.reported:  # all ranks may have waited, so that nobody has ended it
                silence.reported = False
                self._uplink.event(_stall(worker, over=True))
            silence.restart(page.tick_ns, self._agent_pauses.by(page.tick_ns))
        if worker.called_ns:
            self._check_recovery(worker, now_ns)
        floor_ns = self._floor_ms * _MS
        armed = page.deadline_ms > 0
        idle_ns = max(page.deadline_ms * _MS, floor_ns) if armed else _SILENCE_NS
        busy_ns = page.busy_ms * _MS if armed else _BUSY_SILENCE_NS
        silent_ns = silence.quiet_ns(now_ns, held_ns)
        because = _held_still(worker) if silent_ns > floor_ns else ""
        if because and silent_ns > floor_ns << min(silence.repeats, _REPEATS_MAX):
            self._report_stall(worker, now_ns, silent=True, where=because)
        elif because or self._compared(worker, silence if silent_ns > _LATE_NS else timer, now_ns):
            pass
        elif silent_ns > _LATE_NS:  # the interpreter's lock is held, or no processor is free
            limit_ns = min(idle_ns, _SILENCE_NS)
            if self._overdue(worker, silence, now_ns, limit_ns, busy_ns):
                where = f"its interpreter does not run, {where_in_kernel(worker.pid)}"
                self._report_stall(worker, now_ns, silent=True, where=where)
        elif not armed or _waits_in_recovery(page):
            pass  # the coordinator decides how long that may take
        elif _waits(page):
            if self._overdue(worker, timer, now_ns, idle_ns, 0):
                self._report_stall(worker, now_ns)
        elif self._overdue(worker, timer, now_ns, idle_ns, busy_ns):
            self._report_stall(worker, now_ns)
        elif busy_ns and not timer.prolonged and timer.quiet_ns(now_ns, held_ns) > idle_ns:
            timer.prolonged = True
            self._uplink.event(_busy(worker, awaited=False))

    def _compared(self, worker: WorkerHandle, timer: ProgressTimer, now_ns: int) -> bool:
        """Return whether to report now that a worker waits, or is idle where its history says too little, although its
        limit is not over."""
        page, held_ns = worker.page, self._agent_pauses.total_ns
        if page.activity in (Activity.RECOVERING, Activity.WAITING) or not page.deadline_ms:
            return False
        if _waits(page):
            blocked_since = page.blocked_mark not in (0, timer.blocked_mark)  # this was reported
            if blocked_since or not timer.compared_ns:
                self._read_process(worker, timer, now_ns, _WAITS_NS, _WAITS_NS // 2)
            due = timer.quiet_ns(now_ns, held_ns) > _WAITS_NS and (
                not timer.compared_ns or (blocked_since and not page.place_asked)
            )
        elif page.least_ms:
            least_ns = max(page.least_ms, self._floor_ms) * _MS
            self._read_process(worker, timer, now_ns, least_ns, min(least_ns // 2, _SEEN_FROM_NS))
            due = timer.lifeless_ns(now_ns, held_ns) > least_ns and now_ns - timer.compared_ns > _IDLE_AGAIN_NS
        else:
            due = False
        if due:
            worker.progress_timer.reported, timer.compared_ns = True, now_ns
            timer.blocked_mark = page.blocked_mark
            where = f"its interpreter does not run, {where_in_kernel(worker.pid)}" if timer is worker.silence else ""
            for_ms = timer.lifeless_ns(now_ns, held_ns) // _MS
            self._uplink.event(_stall(worker, early=True, for_ms=for_ms, where=where))
        return due

    def _read_process(
        self, worker: WorkerHandle, timer: ProgressTimer, now_ns: int, limit_ns: int, from_ns: int
    ) -> None:
        """Look at a worker's process, if it made no progress for more than ``from_ns``."""
        if timer.quiet_ns(now_ns, self._agent_pauses.total_ns) <= from_ns:
            return
        if timer.is_due(now_ns, min(max(limit_ns // 10, _LOOK_NS[0]), _LOOK_NS[1])):
            timer.add_reading(read_signs(worker.pid)._replace(spins=worker.page.spins))
            worker.page.ask_place()

    def _overdue(self, worker: WorkerHandle, timer: ProgressTimer, now_ns: int, idle_ns: int, busy_ns: int) -> bool:
        self._read_process(worker, timer, now_ns, idle_ns, idle_ns // 2)
        return timer.overdue(now_ns, self._agent_pauses.total_ns, idle_ns, busy_ns)

    def _check_plain(self, worker: WorkerHandle, now_ns: int) -> None:
        """Check a worker without rackrun's control thread. It reports no progress, but it can be seen whether it is
        stopped and whether its interpreter runs."""
        tick_ns, silence = worker.page.plain_tick_ns, worker.silence
        if tick_ns != silence.since_ns:
            silence.restart(tick_ns, self._agent_pauses.by(tick_ns))
        if now_ns < worker.plain_ns:
            return
        worker.plain_ns = now_ns + _PLAIN_LOOK_NS
        held_ns = self._agent_pauses.total_ns - self._agent_pauses.by(worker.stopped_ns)
        if not _held_still(worker):
            worker.stopped_ns = 0
            if tick_ns and self._overdue(worker, silence, now_ns, _SILENCE_NS, _BUSY_SILENCE_NS):
                for_ms, where = (
                    silence.quiet_ns(now_ns, self._agent_pauses.total_ns) // _MS,
                    where_in_kernel(worker.pid),
                )
                silence.mark_reported(now_ns, self._agent_pauses.total_ns)
                where = f"its interpreter does not run, {where}"
                self._uplink.event(_stall(worker, silent=True, for_ms=for_ms, where=where))
        elif not worker.stopped_ns:
            worker.stopped_ns = now_ns - 1
        elif now_ns - worker.stopped_ns - held_ns > max(_PLAIN_STOPPED_NS, self._floor_ms * _MS):
            for_ms, worker.stopped_ns = (now_ns - worker.stopped_ns) // _MS, now_ns
            self._uplink.event(_stall(worker, silent=True, for_ms=for_ms, where=_held_still(worker)))

    def _check_recovery(self, worker: WorkerHandle, now_ns: int) -> None:
        """Report a worker that does not come to the next generation while all others do. While it works, its limits
        hold."""
        page = worker.page
        if page.generation >= worker.called_to or page.activity is Activity.EXITING:
            worker.called_ns = 0
        elif now_ns - worker.called_ns > _COMES_NS:
            in_script = page.activity not in (Activity.RECOVERING, Activity.WAITING)
            if page.tick_ns < worker.called_ns or (in_script and worker.called_with_plan):
                page.ask_place()
                worker.called_ns = now_ns + _COMES_AGAIN_NS - _COMES_NS
                self._uplink.event(_busy(worker, awaited=True))

    def _report_stall(self, worker: WorkerHandle, now_ns: int, *, silent: bool = False, where: str = "") -> None:
        page = worker.page
        quiet_ns = now_ns - (page.tick_ns if silent else page.since_ns)
        for timer in (worker.progress_timer, worker.silence):
            timer.mark_reported(now_ns, self._agent_pauses.total_ns)
        worker.silence.reported = silent
        self._uplink.event(_stall(worker, silent=silent, for_ms=quiet_ns // _MS, where=where))


def _stall(
    worker: WorkerHandle,
    *,
    silent: bool = False,
    over: bool = False,
    early: bool = False,
    for_ms: int = 0,
    where: str = "",
) -> WorkerStalled:
    page = worker.page
    return WorkerStalled(
        slot=worker.slot,
        incarnation=worker.incarnation,
        step=Step(page.at.step),
        phase=page.at.phase,
        collective=page.collectives[0],
        silent=silent,
        for_ms=for_ms,
        waiting=_waits(page),
        over=over,
        unit="" if over or not page.tick_ns else unit_of(page),
        where=where or ("" if over else page.place),
        allowed_ms=page.least_ms if early else page.deadline_ms,
        early=early,
        took_ms=page.own_ms if _waits(page) else -1,
        blocked=page.blocked if _waits(page) and page.activity in _UNITS and not (over or silent) else None,
    )


def _busy(worker: WorkerHandle, *, awaited: bool) -> WorkerBusy:
    page = worker.page
    return WorkerBusy(
        slot=worker.slot,
        incarnation=worker.incarnation,
        unit=unit_of(page),
        where=page.place,
        for_ms=max(time.monotonic_ns() - page.since_ns, 0) // _MS,
        allowed_ms=page.busy_ms or page.deadline_ms,
        awaited=awaited,
    )


def unit_of(page: HeartbeatPage) -> str:
    """Return what the main thread is in, for people."""
    after = f" {after_step(page.at.step)}"
    match page.activity:
        case Activity.SETUP:
            return "setup" if page.at.step < 0 else f"main, entered again{after}"
        case Activity.STEP:
            return f"step {page.at.step}"
        case Activity.PHASE:
            return f"phase {page.unit_name or page.at.phase}{after}"
        case Activity.BETWEEN:
            return f"the script's code between two units,{after}"
        case Activity.EXITING:
            return "the script's code after main"
        case Activity.RECOVERING:
            return f"a recovery{after}"
        case Activity.WAITING:
            return "a wait"


def _held_still(worker: WorkerHandle) -> str:
    """Return what prevents the process from running; "": nothing does."""
    if worker.stopped():
        return "it is stopped by a signal"
    return "its control group is frozen" if frozen(worker.pid) else ""


def _waits(page: HeartbeatPage) -> bool:
    """Return whether the worker waits for others in a collective."""
    entered, completed = page.collectives
    return entered > completed


def _waits_in_recovery(page: HeartbeatPage) -> bool:
    return page.activity is Activity.RECOVERING or (page.activity is Activity.SETUP and _waits(page))
