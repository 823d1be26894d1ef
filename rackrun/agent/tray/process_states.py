"""One worker process as its tray's machine sees it: its state, and the transitions of its table.

A place, which is a slot of the tray, is free when all its processes are GONE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import StartWorker, Worker

__all__ = ["PROCESS_TRANSITIONS", "ProcessRecord", "ProcessState", "ProcessTrigger"]


class ProcessState(StrEnum):
    """Where a worker process stands between the command to start it and its end."""

    WAITING = "waiting"
    """The slot's previous process is not gone yet."""
    STARTING = "starting"
    """What it needs is being found; no process was asked for."""
    FORKING = "forking"
    """The fork server was asked for it."""
    RUNNING = "running"
    FENCING = "fencing"
    """It is killed, if need be as soon as it exists."""
    ENDING = "ending"
    """Its exit was reported, and it is not reaped yet: its exit handlers run, or its memory is torn down."""
    GONE = "gone"
    """It was reaped, or never existed."""


class ProcessTrigger(StrEnum):
    """What moves a process from one state to another."""

    CLEARED = "cleared"
    FOUND = "found"
    BORN = "born"
    FENCE = "fence"
    END = "end"
    REAP = "reap"
    FAIL = "fail"
    """There will be no process."""


PROCESS_TRANSITIONS: Mapping[ProcessState, Mapping[ProcessTrigger, ProcessState]] = {
    ProcessState.WAITING: {
        ProcessTrigger.CLEARED: ProcessState.STARTING,
        ProcessTrigger.FAIL: ProcessState.GONE,
    },
    ProcessState.STARTING: {
        ProcessTrigger.FOUND: ProcessState.FORKING,
        ProcessTrigger.FAIL: ProcessState.GONE,
    },
    ProcessState.FORKING: {
        ProcessTrigger.BORN: ProcessState.RUNNING,
        ProcessTrigger.FENCE: ProcessState.FENCING,
        ProcessTrigger.END: ProcessState.ENDING,
        ProcessTrigger.FAIL: ProcessState.GONE,
    },
    ProcessState.RUNNING: {
        ProcessTrigger.FENCE: ProcessState.FENCING,
        ProcessTrigger.END: ProcessState.ENDING,
    },
    ProcessState.FENCING: {
        ProcessTrigger.BORN: ProcessState.FENCING,
        ProcessTrigger.FENCE: ProcessState.FENCING,
        ProcessTrigger.END: ProcessState.ENDING,
        ProcessTrigger.FAIL: ProcessState.GONE,
    },
    ProcessState.ENDING: {
        ProcessTrigger.BORN: ProcessState.ENDING,
        ProcessTrigger.FENCE: ProcessState.ENDING,
        ProcessTrigger.REAP: ProcessState.GONE,
        ProcessTrigger.FAIL: ProcessState.GONE,
    },
    ProcessState.GONE: {},
}
"""The transition table. A process can speak before the fork server's answer is read, so FORKING has ``end``."""


@dataclass(slots=True, eq=False)
class ProcessRecord:
    """One incarnation of a worker in its slot."""

    command: StartWorker
    state: ProcessState = ProcessState.WAITING
    born: bool = False
    """Whether its process has existed."""
    keeps: bool = False
    """Whether it left sealed snapshots."""
    worker: Worker = field(init=False)
    _story: list[ProcessTrigger] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Worker(self.command.slot, self.command.incarnation)

    def move(self, trigger: ProcessTrigger) -> None:
        """Make one transition of the table. Raises `InvalidTransition`, and changes nothing, if there is none."""
        try:
            state = PROCESS_TRANSITIONS[self.state][trigger]
        except KeyError:
            who = f"the process of {self.worker.slot} incarnation {self.worker.incarnation}"
            raise InvalidTransition(who, self.state, trigger, [ProcessState.WAITING, *self._story]) from None
        if state is not self.state:  # what repeats, such as a fence, leaves the story short
            self._story.append(trigger)
        self.state = state

    @property
    def gone(self) -> bool:
        """Whether the process has ended and was reaped."""
        return self.state is ProcessState.GONE

    @property
    def reported(self) -> bool:
        """Whether its exit was reported."""
        return self.state in (ProcessState.ENDING, ProcessState.GONE)
