"""Faults that are signals: kill processes, stop them, ask them to leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from rackrun.chaos.injectors.common.injection import CONFIRM_S, StrikeOutcome
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.chaos.testbed.machine.undo_log import Continue, UndoLog

__all__ = ["Killed", "Paused", "Preempted"]


class Killed:
    """Processes killed by one signal, all at once. It has taken effect when all are gone."""

    def __init__(self, processes: Sequence[Process], number: signal.Signals) -> None:
        self._began_s = time.monotonic()
        self._processes, self._name = processes, number.name
        self._missed = sum(not process.send(number) for process in processes)

    def outcome(self) -> StrikeOutcome | None:
        waited_s = time.monotonic() - self._began_s
        if self._missed == len(self._processes):
            return StrikeOutcome(False, "gone already")
        left = [process.pid for process in self._processes if process.state]
        if not left:
            gone = f"{self._name}: {_numbers(self._processes)} gone after {waited_s:.3f} s"
            return StrikeOutcome(True, gone, self._began_s)
        return StrikeOutcome(False, f"{self._name}: {left} live on") if waited_s > CONFIRM_S else None

    def take_back(self) -> None:
        raise AssertionError("the dead stay dead")


class Paused:
    """Processes stopped by SIGSTOP. It has taken effect when the kernel reports each of them as stopped."""

    def __init__(self, processes: Sequence[Process], undo: UndoLog) -> None:
        self._began_s = time.monotonic()
        self._processes, self._undo = processes, undo
        # Whoever watches others is stopped before them and goes on after them, and so sees nobody stopped.
        self._record = undo.record(Continue(tuple(reversed(processes))))
        self._struck = [process for process in processes if process.send(signal.SIGSTOP)]

    def outcome(self) -> StrikeOutcome | None:
        if not self._struck:
            return StrikeOutcome(False, "gone already")
        # A process that is gone by now got the signal all the same, which cannot be refused, and was killed while
        # stopped.
        if all(process.state in ("T", "t", "") for process in self._struck):
            return StrikeOutcome(True, f"stopped: {_numbers(self._struck)}", self._began_s)
        late = time.monotonic() - self._began_s > CONFIRM_S
        return StrikeOutcome(False, f"not all of {_numbers(self._struck)} are stopped") if late else None

    def take_back(self) -> None:
        self._undo.heal(self._record)


class Preempted:
    """The agent gets SIGTERM; when the notice is over, all processes of the tray get SIGKILL."""

    def __init__(self, processes: Sequence[Process], notice_s: float) -> None:
        """``processes``: those of the tray, the agent first. ``notice_s``: seconds from SIGTERM to SIGKILL."""
        self._began_s, self._notice_s = time.monotonic(), notice_s
        self._agent, self._processes = processes[0], processes
        self._missed, self._killed = not self._agent.send(signal.SIGTERM), False

    def outcome(self) -> StrikeOutcome | None:
        waited_s = time.monotonic() - self._began_s
        if self._missed:
            return StrikeOutcome(False, "gone already")
        if not self._agent.state:
            how = "killed when the notice was over" if self._killed else "left by itself"
            return StrikeOutcome(True, f"agent {self._agent.pid} {how}, after {waited_s:.3f} s", self._began_s)
        if waited_s > self._notice_s and not self._killed:
            self._killed = True
            for process in self._processes:
                process.send(signal.SIGKILL)
        return (
            StrikeOutcome(False, f"agent {self._agent.pid} lives on") if waited_s > self._notice_s + CONFIRM_S else None
        )

    def take_back(self) -> None:
        raise AssertionError("it does not last")


def _numbers(processes: Sequence[Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)
