"""Start processes: an agent for a tray that was given up, or a second agent or coordinator beside the first."""

from __future__ import annotations

import signal
import time

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.targets import Subject
from rackrun.chaos.injectors.common.injection import Missed, StrikeOutcome
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.chaos.testbed.machine.undo_log import EndProcess

__all__ = ["Doubled", "Returned"]

_PATIENCE_S = 240.0
"""Seconds to wait for a fresh interpreter that imports torch on a busy machine."""


class Returned:
    """An agent is started for a tray that has none. It has taken effect when the coordinator has accepted the tray."""

    def __init__(self, job: JobUnderTest, tray: str) -> None:
        if tray in job.joined():
            raise Missed(f"{tray} is there")
        self._began_s, self._job, self._tray = time.monotonic(), job, tray
        self._agent = job.beside.agent(tray)

    def outcome(self) -> StrikeOutcome | None:
        if self._tray in self._job.joined():
            return StrikeOutcome(True, f"{self._tray} is back, after {time.monotonic() - self._began_s:.3f} s")
        if self._job.over:
            self._agent.process.send(signal.SIGKILL)  # it would wait for a coordinator for a minute
            return StrikeOutcome(False, "the job was over before its agent was taken in")
        if self._agent.exit_code is not None:
            return StrikeOutcome(False, f"its agent ended ({self._agent.exit_code}): {self._agent.last_words()}")
        late = time.monotonic() - self._began_s > _PATIENCE_S
        return StrikeOutcome(False, f"its agent was not taken in: {self._agent.last_words()}") if late else None

    def take_back(self) -> None:
        raise AssertionError("a return takes effect once and is never taken back")


class Doubled:
    """A second agent or coordinator. It has taken effect when it has been told to wait or has been refused.

    If neither happens in time, it counts as taken effect, too: the oracles judge what the duplicate does.
    """

    def __init__(self, job: JobUnderTest, subject: Subject) -> None:
        self._began_s, self._undo = time.monotonic(), job.undo
        first = job.launcher() if subject.kind is Subjects.COORDINATOR else job.agents().get(subject.name)
        if first is None:
            raise Missed(f"there is no {subject} that could have a double")
        self._second = (
            job.beside.coordinator() if subject.kind is Subjects.COORDINATOR else job.beside.agent(subject.name)
        )
        self._record = job.undo.record(EndProcess(self._second.process))  # before, the job's undo would end it
        self._what = str(subject)

    def outcome(self) -> StrikeOutcome | None:
        code, said = self._second.exit_code, self._second.said.read_text(errors="replace")
        if code is not None and code < 0:
            return StrikeOutcome(False, f"a second {self._what} was ended before it was answered")
        if code is not None:
            return StrikeOutcome(
                True, f"a second {self._what} was refused (exit code {code}): {self._second.last_words()}"
            )
        if "does not take this tray yet" in said:
            return StrikeOutcome(True, f"a second {self._what} waits: {self._second.last_words()}")
        late = time.monotonic() - self._began_s > _PATIENCE_S
        return StrikeOutcome(True, f"a second {self._what} runs beside the first") if late else None

    def take_back(self) -> None:
        self._undo.heal(self._record)
        self._second.wait()
