"""What every fault is: a value with a name, of a family, that can strike some kinds of subjects.

A fault says *what* goes wrong. A `rackrun.chaos.faults.targets.Target` says where it strikes, and a trigger of the plan
says when. A fault that lasts is taken back by its injector after ``for_s`` seconds or, where ``for_s`` is None, when
the plan heals. Each fault is a module in a room below this one: its class, and its row of
`rackrun.chaos.faults.table.fault_table.FAULTS`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

__all__ = ["PROCESSES", "WORKERS", "BaseFault", "Complaint", "Family", "Subjects", "name_of"]

Complaint = tuple[str, str]
"""What is wrong, and what to do about it."""


class Family(StrEnum):
    """A group of related faults, which a generator of random plans switches on or off together."""

    PROCESS = "process"
    HANG = "hang"
    SLOW = "slow"
    HARDWARE = "hardware"
    NETWORK = "network"
    STORAGE = "storage"
    CORRUPTION = "corruption"
    CLOCK = "clock"
    CONTROL = "control"
    DATA = "data"


class Subjects(StrEnum):
    """Kinds of things that a fault can strike."""

    RANK = "rank"
    """A worker that trains."""
    SPARE = "spare"
    AGENT = "agent"
    """The agent of a tray; its workers die with it."""
    TRAY = "tray"
    """All processes of a tray, at once."""
    RACK = "rack"
    COORDINATOR = "coordinator"
    """The coordinator; where the launcher hosts it, coordinator and launcher are one process."""
    STORAGE = "storage"
    """The file system to which checkpoints are written."""


WORKERS = (Subjects.RANK, Subjects.SPARE)
PROCESSES = (*WORKERS, Subjects.AGENT, Subjects.TRAY, Subjects.RACK)


class BaseFault(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="fault", forbid_unknown_fields=True, omit_defaults=True
):
    """The base of all faults."""

    family: ClassVar[Family]
    strikes: ClassVar[tuple[Subjects, ...]]
    lasts: ClassVar[bool] = False
    """The fault goes on until it is taken back, and then leaves no trace."""
    loses: ClassVar[bool] = False
    """A process struck by this fault does not come back by itself."""


def name_of(fault: BaseFault | type[BaseFault]) -> str:
    """Return the fault's name in plans: ``kill``."""
    return str(fault.__struct_config__.tag)
