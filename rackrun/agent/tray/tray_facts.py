"""Facts that the machine of a tray is given, and effects that it asks for (`rackrun.agent.tray.tray_machine`).

Whoever runs the machine, the agent or the simulator, carries the effects out in order.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from rackrun.protocol.commands import ResumeGeneration, StartWorker, Worker, WorkerCommand
from rackrun.protocol.events import ScriptFailure
from rackrun.protocol.wire import AgentEvent, Upward

__all__ = [
    "AdmitWorker",
    "BuryWorker",
    "CommandArrived",
    "DeadlinePassed",
    "DepartureOver",
    "Emptied",
    "EndSeen",
    "FindStore",
    "ForgetWorker",
    "ForkServerDied",
    "ForkWorker",
    "Forward",
    "GraceOver",
    "JobOver",
    "KillOver",
    "KillWorker",
    "Leave",
    "LeaveAsked",
    "PassOn",
    "PrintLine",
    "ProcessEffect",
    "ProcessReaped",
    "ReportExit",
    "SendEvent",
    "SetDeadline",
    "SpareLeaves",
    "SpareWaits",
    "WorkerStartFailed",
    "StoodStill",
    "StopBegun",
    "StopGraceOver",
    "StoreFound",
    "TerminateWorker",
    "TrayDeadline",
    "TrayEffect",
    "TrayFact",
    "Urgency",
    "WorkerBorn",
    "WorkerFact",
    "WorkerGarbled",
    "WorkerSaid",
]


class Urgency(Enum):
    """How soon a message must be sent, and whether it may be dropped."""

    NOW = "an event"
    SOON = "telemetry that must arrive"
    MAYBE = "telemetry that may be dropped in a flood, the oldest first"


class _Value(msgspec.Struct, frozen=True, gc=False):
    pass


# -- deadlines
class GraceOver(_Value, frozen=True):
    """A worker whose script is over has had the time for its exit handlers."""

    worker: Worker


class DepartureOver(_Value, frozen=True):
    """The tray has had the time to be left by its ranks."""


class StopGraceOver(_Value, frozen=True):
    """The workers have had the time to end after SIGTERM."""


class KillOver(_Value, frozen=True):
    """Workers that are still there this long after SIGKILL are given up."""


TrayDeadline: TypeAlias = GraceOver | DepartureOver | StopGraceOver | KillOver
"""Deadlines are never cancelled. One that is no longer needed has no effect."""


# -- facts
class CommandArrived(_Value, frozen=True):
    """A command of the coordinator arrived."""

    command: WorkerCommand


class StoreFound(_Value, frozen=True):
    """What a worker needs for its start was found."""

    worker: Worker


class WorkerStartFailed(_Value, frozen=True):
    """A worker's start failed before it had a process."""

    worker: Worker
    because: str


class WorkerBorn(_Value, frozen=True):
    """A worker's process exists."""

    worker: Worker


class WorkerSaid(_Value, frozen=True):
    """A worker sent a message."""

    worker: Worker
    message: Upward


class WorkerGarbled(_Value, frozen=True):
    """A worker sent what is no message. ``error``: why not."""

    worker: Worker
    error: str


class EndSeen(_Value, frozen=True):
    """A worker's process ends, or has ended. Everything that it said before has been passed to the machine."""

    worker: Worker
    exit_code: int | None
    signal: int | None


class ProcessReaped(_Value, frozen=True):
    """The kernel has reaped a worker's process. All its messages came before. ``keeps``: whether sealed snapshots of it
    remain."""

    worker: Worker
    exit_code: int | None
    signal: int | None
    keeps: bool


class ForkServerDied(_Value, frozen=True):
    """The fork server died, and all starts that it was asked for with it. Another one takes its place."""


class LeaveAsked(_Value, frozen=True):
    """The host asks the agent to leave (SIGTERM). ``exit_code``: as in `DepartureAnnounced`."""

    because: str
    exit_code: int


class JobOver(_Value, frozen=True):
    """The launcher says that the job is over. ``connected``: the coordinator will say how it ended."""

    connected: bool


class StoodStill(_Value, frozen=True):
    """The agent did not run for ``for_ms`` milliseconds, though it had nothing to do and did not wait for a processor.

    ``workers_ran``: as in `rackrun.protocol.events.TrayStoodStill`.
    """

    for_ms: int
    workers_ran: bool | None = None


class StopBegun(_Value, frozen=True):
    """The agent ends, and its workers with it. ``failed``: they get no time to end well."""

    failed: bool


class DeadlinePassed(_Value, frozen=True):
    """A deadline that the machine has set is over."""

    deadline: TrayDeadline


WorkerFact: TypeAlias = (
    StoreFound | WorkerStartFailed | WorkerBorn | WorkerSaid | WorkerGarbled | EndSeen | ProcessReaped
)
"""Facts about one worker. One about a worker that is gone, or not known, has no effect."""
TrayFact: TypeAlias = (
    WorkerFact | CommandArrived | ForkServerDied | LeaveAsked | JobOver | StoodStill | StopBegun | DeadlinePassed
)


# -- effects
class AdmitWorker(_Value, frozen=True):
    """Hold a new worker; messages may be passed to it from now on, before it has a process.

    ``plan``: the latest plan, which names it; None: that plan does not, or there is none.
    """

    command: StartWorker
    plan: ResumeGeneration | None


class FindStore(_Value, frozen=True):
    """Find what a worker needs for its start. Answered by `StoreFound` or `WorkerStartFailed`."""

    command: StartWorker


class ForkWorker(_Value, frozen=True):
    """Ask for a worker's process. Answered by `WorkerBorn` or `WorkerStartFailed`."""

    command: StartWorker


class KillWorker(_Value, frozen=True):
    """Send SIGKILL to a worker's process now, or as soon as it exists."""

    worker: Worker


class TerminateWorker(_Value, frozen=True):
    """Send SIGTERM to a worker's whole process group."""

    worker: Worker


class ReportExit(_Value, frozen=True):
    """Report a worker's exit, with what its heartbeat page says."""

    worker: Worker
    exit_code: int | None
    signal: int | None
    failure: ScriptFailure | None


class BuryWorker(_Value, frozen=True):
    """Close what belongs to a worker's process. What it left, its page and snapshots, is kept.

    The worker may have had no process: then its start is given up.
    """

    worker: Worker


class ForgetWorker(_Value, frozen=True):
    """Drop what a worker that is gone has left."""

    worker: Worker


class PassOn(_Value, frozen=True):
    """Pass a command on to these workers of this tray."""

    command: WorkerCommand
    workers: tuple[Worker, ...]


class Forward(_Value, frozen=True):
    """Send the message of the fact that is being handled to the coordinator, unchanged."""

    urgency: Urgency


class SendEvent(_Value, frozen=True):
    """Send an event of the tray's own to the coordinator."""

    event: AgentEvent


class SpareWaits(_Value, frozen=True):
    """A spare waits: a filler may run beside it."""

    worker: Worker


class SpareLeaves(_Value, frozen=True):
    """A worker does not wait as a spare (any more): end the filler beside it. ``because``: why."""

    worker: Worker
    because: str


class SetDeadline(_Value, frozen=True):
    """Give the machine `DeadlinePassed` at ``at_s``."""

    deadline: TrayDeadline
    at_s: float


class PrintLine(_Value, frozen=True):
    """Print a line for people."""

    text: str


class Leave(_Value, frozen=True):
    """End the agent. `StopBegun` follows, with the same ``failed``."""

    failed: bool


class Emptied(_Value, frozen=True):
    """After `StopBegun`: no worker is left, or waiting for one longer would be in vain."""


ProcessEffect: TypeAlias = (
    AdmitWorker | FindStore | ForkWorker | KillWorker | TerminateWorker | ReportExit | BuryWorker | ForgetWorker
)
"""Effects on one worker's process."""
TrayEffect: TypeAlias = (
    ProcessEffect | PassOn | Forward | SendEvent | SpareWaits | SpareLeaves | SetDeadline | PrintLine | Leave | Emptied
)
