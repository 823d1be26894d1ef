"""The interface of every injector: a strike begins at once, and its outcome is asked for later."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.strike_tools import Injected, StrikeOutcome
from rackrun.chaos.faults.targets import Scene, Subject
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["CONFIRM_S", "All", "Injected", "Missed", "StrikeOutcome", "whom"]

CONFIRM_S = 60.0
"""A strike that has not taken effect after this many seconds has failed, and the run's verdict is *unknown*. Machines
are busy."""


class All:
    """Several strikes that count as one: it has taken effect when all have."""

    def __init__(self, parts: Sequence[Injected]) -> None:
        self._parts = parts

    def outcome(self) -> StrikeOutcome | None:
        found = [part.outcome() for part in self._parts]
        known = [outcome for outcome in found if outcome is not None]
        if len(known) < len(found):
            return None
        struck = [one.struck_s for one in known if one.struck_s is not None]
        return StrikeOutcome(
            all(one.took for one in known), "; ".join(one.detail for one in known), min(struck, default=None)
        )

    def take_back(self) -> None:
        for part in reversed(self._parts):
            part.take_back()


class Missed(Exception):
    """There is nothing to strike."""


def whom(job: JobUnderTest, scene: Scene, subjects: tuple[Subject, ...]) -> list[Process]:
    """Return the processes of ``subjects``. Raises `Missed` if a subject has none."""
    found: list[Process] = []
    for subject in subjects:
        match subject.kind:
            case Subjects.COORDINATOR:
                launcher = job.launcher()
                of = [launcher] if launcher is not None else []
            case Subjects.AGENT:
                agent = job.agents().get(subject.name)
                of = [agent] if agent is not None else []
            case Subjects.TRAY | Subjects.RACK:
                of = [process for tray in sorted({p.tray for p in scene.of(subject)}) for process in job.tray(tray)]
            case _:
                workers = job.workers()
                of = [workers[place.slot] for place in scene.of(subject) if place.slot in workers]
        if not of:
            raise Missed(f"there is no process of {subject}")
        found += of
    return found
