"""The real core and the real driver, told as in `tests.core.core_harness`, with all of it in a journal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.shell.driver import Driver
from rackrun.core.machine.control_plane import ControlPlane, View
from rackrun.protocol.commands import Command, StartWorker
from rackrun.protocol.events import Event
from rackrun.protocol.job_config import JobConfig
from tests.coordinator.fakes import ClockedLoop, Onlooker
from tests.core.core_harness import CoreHarness


class JournaledJob(CoreHarness):
    """Time is ``now``, in milliseconds. Timers fire when the test says so: it never awaits."""

    def __init__(self, config: JobConfig, journal: Journal) -> None:
        super().__init__(config)
        journal.fact("config", msgspec.json.encode(config).decode())
        self.journal = journal
        loop = ClockedLoop(lambda: self.now / 1e3)
        self.driver = Driver(_Asked(self), journal, run_id="job-1", observer=Onlooker(), loop=loop)

    def tell(self, event: Event) -> Sequence[Command]:
        before = len(self.answers)
        self.driver.submit(event)
        return self.answers[before:]

    def end(self) -> None:
        """As the launcher closes a journal; of a job that has not stopped, as a killed one leaves it."""
        self.driver.close()
        over = self.driver.over
        if over is not None:
            for key, value in (("exit_code", over.exit_code), ("because", over.because), ("ended_ms", self.now)):
                self.journal.fact(key, value)
        self.journal.flush()


class _Asked:
    """The core, as the driver asks it."""

    def __init__(self, harness: JournaledJob) -> None:
        self._harness = harness
        self._core: ControlPlane = harness.core

    def handle(self, event: Event) -> Sequence[Command]:
        commands = self._core.handle(event)
        self._core.check_invariants()
        for command in commands:
            if isinstance(command, StartWorker):
                self._harness.incarnation[command.slot] = command.incarnation
        self._harness.answers.extend(commands)
        return commands

    @property
    def sent_by(self) -> Sequence[str]:
        return self._core.sent_by

    def view(self) -> View:
        return self._core.view()
