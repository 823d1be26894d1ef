"""Carry faults out on this machine. Every injector first records how to undo its fault, then strikes, then confirms."""

from __future__ import annotations

from collections.abc import Callable

from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Subjects
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.faults.targets import Scene
from rackrun.chaos.injectors.common.injection import Injected, Missed, StrikeOutcome
from rackrun.chaos.injectors.job_tools import JobTools
from rackrun.chaos.injectors.machine_abilities import ThisMachine
from rackrun.chaos.plan.conductor import StrikeOrder
from rackrun.chaos.testbed.job_under_test import JobUnderTest

__all__ = ["Injected", "Missed", "StrikeOutcome", "inject", "refusal"]


def refusal(fault: BaseFault, kind: Subjects) -> Complaint | None:
    """Return why a real job cannot have ``fault`` at a subject of this kind, and what to do about it; None if
    it can."""
    return row_of(fault).refusal(fault, kind, ThisMachine())


def inject(strike: StrikeOrder, scene: Scene, job: JobUnderTest, seed: Callable[[], int]) -> Injected:
    """Begin a strike, and return its handle.

    ``seed`` returns the seed for what the fault draws at random. Raises `Missed` when there is nothing to strike, and
    ``OSError`` when the machine refuses.
    """
    return row_of(strike.fault).inject(strike.fault, JobTools(strike, scene, job, seed))
