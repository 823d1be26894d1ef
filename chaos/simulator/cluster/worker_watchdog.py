"""Model of how an agent watches one worker, which may not be without progress for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.protocol.events import WorkerStalled
from rackrun.protocol.ids import Step

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["WorkerWatchdog"]

PATIENCE_MAX = 8


class WorkerWatchdog:
    """The watchdog of one worker."""

    def __init__(self, of: SimulatedWorker) -> None:
        self._of, self._sim = of, of.sim
        self._patience, self._came_in = 1, -1
        self._told_silent = False
        """Whether it was reported that the process is stopped, and not yet that it runs again."""
        self._told_ns = -1
        """The progress at which a stall was reported that is not over yet; -1: there is none."""

    def begin(self) -> None:
        self._of.agent.later(self._sim.costs.stall_s, self._look)

    def resumed(self, *, nobody_was_lost: bool) -> None:
        self._came_in = self._of.passed
        if nobody_was_lost:
            self._patience = min(2 * self._patience, PATIENCE_MAX)  # what looked like a hang was slowness

    def _look(self) -> None:
        """Check for progress, again and again. The watchdog does not check while the agent itself is stopped."""
        of = self._of
        if not of.alive:
            return
        costs, now_ns = self._sim.costs, self._sim.engine.now_ns
        if self._told_ns not in (-1, of.progress_ns):
            self._told_ns = -1
            self._runs_again()
        elif self._told_silent and not of.paused:
            self._told_silent = False
            self._runs_again()
        of.agent.later(costs.stall_s / 2, self._look)
        if of.paused and now_ns - of.silent_ns > costs.silence_s * 1e9:
            self._told_silent = True
            self._stalled(now_ns - of.silent_ns, silent=True)
        elif of.state != "running" or of.finished or of.between_units or of.paused:
            return
        elif of.passed < 0:
            if of.entered_in is not None and now_ns - of.progress_ns > costs.connect_s * 1e9:
                of.end(code=1, bug="torch", kind="torch.distributed.DistNetworkError")
        else:
            floor_s = costs.stall_s if of.passed - self._came_in >= 2 else max(costs.unsure_s, costs.stall_s)
            deadline_s = self._patience * floor_s + costs.step_s * of.slow
            if now_ns - of.progress_ns > deadline_s * 1e9:
                for_ns, of.progress_ns = now_ns - of.progress_ns, now_ns
                self._stalled(for_ns, silent=False)

    def _runs_again(self) -> None:
        step = Step(self._of.passed + 1)
        self._of.say(WorkerStalled, step=step, collective=0, silent=False, for_ms=0, over=True)

    def _stalled(self, for_ns: int, *, silent: bool) -> None:
        of = self._of
        collective = 2 * of.passed + (of.entered_in is not None)
        for_ms = for_ns // 1_000_000
        waiting = not silent and of.entered_in is not None
        self._told = silent is False
        of.say(
            WorkerStalled,
            step=Step(of.passed + 1),
            collective=collective,
            silent=silent,
            for_ms=for_ms,
            waiting=waiting,
        )
