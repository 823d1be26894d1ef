"""What can go wrong, as values. A fault says *what*; where it strikes is a `rackrun.chaos.faults.targets.Target`, when a trigger of the plan.

A fault that lasts is taken back by its injector after ``for_s`` seconds, or, where that is None, when the plan heals.
What each takes on a machine is in `rackrun.chaos.injectors`; what of it there is in virtual time, in `rackrun.chaos.simulator`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal

import msgspec

__all__ = [
    "CrashAt",
    "DelayCollective",
    "DiskFails",
    "DiskFull",
    "Duplicate",
    "ExhaustMemory",
    "Family",
    "Fault",
    "FlipBit",
    "GpuFails",
    "HoldGil",
    "Kill",
    "Link",
    "Partition",
    "Pause",
    "PoisonBatch",
    "Preempt",
    "Raise",
    "Return",
    "Slow",
    "StepClock",
    "Subjects",
    "Xid",
    "all_faults",
    "name_of",
]


class Family(StrEnum):
    """What a swarm switches on and off as one."""

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
    """Of a tray; its workers die with it."""
    TRAY = "tray"
    """All processes of it, at once."""
    RACK = "rack"
    COORDINATOR = "coordinator"
    """Where the launcher hosts it, both."""
    STORAGE = "storage"
    """Where checkpoints are written."""


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="fault", forbid_unknown_fields=True, omit_defaults=True
):
    family: ClassVar[Family]
    strikes: ClassVar[tuple[Subjects, ...]]
    lasts: ClassVar[bool] = False
    """It goes on until it is taken back, and is gone without a trace then."""
    loses: ClassVar[bool] = False
    """A process that it strikes does not come back by itself."""


_WORKERS = (Subjects.RANK, Subjects.SPARE)
_PROCESSES = (*_WORKERS, Subjects.AGENT, Subjects.TRAY, Subjects.RACK)


# -- processes
class Kill(_Fault, frozen=True, kw_only=True, tag="kill"):
    """A signal that ends it; a tray's or a rack's processes all at once."""

    family = Family.PROCESS
    strikes = (*_PROCESSES, Subjects.COORDINATOR)
    loses = True
    signal: Literal["KILL", "SEGV", "ABRT", "BUS", "TERM"] = "KILL"


class Raise(_Fault, frozen=True, kw_only=True, tag="raise"):
    """An exception in the step function."""

    family = Family.PROCESS
    strikes = (Subjects.RANK,)
    loses = True
    error: str = "RuntimeError"


class ExhaustMemory(_Fault, frozen=True, kw_only=True, tag="exhaust_memory"):
    """It allocates until the kernel ends it, in a memory cgroup of its own."""

    family = Family.PROCESS
    strikes = _WORKERS
    loses = True


class CrashAt(_Fault, frozen=True, kw_only=True, tag="crash_at"):
    """It exits in the code, the ``nth`` time that it comes to the named point (`rackrun.chaos.faults.crash_points`), or, if that has been, the next."""

    family = Family.PROCESS
    strikes = (*_WORKERS, Subjects.AGENT, Subjects.COORDINATOR)
    loses = True
    point: str
    nth: int = 1


class Return(_Fault, frozen=True, kw_only=True, tag="return"):
    """No fault: a tray that was lost is started again."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)


# -- hangs and slowness
class Pause(_Fault, frozen=True, kw_only=True, tag="pause"):
    """SIGSTOP, then SIGCONT: who was given up meanwhile wakes up, and must do no harm."""

    family = Family.HANG
    strikes = (*_PROCESSES, Subjects.COORDINATOR)
    lasts = True
    for_s: float | None = None


class HoldGil(_Fault, frozen=True, kw_only=True, tag="hold_gil"):
    """No Python runs in it; its native threads do."""

    family = Family.HANG
    strikes = _WORKERS
    for_s: float = 2.0


class DelayCollective(_Fault, frozen=True, kw_only=True, tag="delay_collective"):
    """It comes late to its next collective."""

    family = Family.HANG
    strikes = (Subjects.RANK,)
    for_s: float = 2.0


class Slow(_Fault, frozen=True, kw_only=True, tag="slow"):
    """It gets only ``share`` of a processor."""

    family = Family.SLOW
    strikes = (*_WORKERS, Subjects.TRAY)
    lasts = True
    share: float = 0.3
    for_s: float | None = None


# -- hardware
class Xid(_Fault, frozen=True, kw_only=True, tag="xid"):
    """The GPU's driver reports an error; see `rackrun.topology` for what each means."""

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    code: int
    for_s: float | None = None


class GpuFails(_Fault, frozen=True, kw_only=True, tag="gpu_fails"):
    """The GPU's driver says this of it when it is asked. ``lost``, ``reset``, ``reboot``, ``drain_p2p``: as the words are; ``row``: a row of its
    memory waits for a reset; ``sram``: too many errors there; ``ecc``: one error that was corrected, which means nothing; ``link``: an NVLink is
    down; ``fabric``: its registration is gone."""

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    says: Literal["lost", "reset", "reboot", "drain_p2p", "row", "sram", "ecc", "link", "fabric"]
    for_s: float | None = None


class Preempt(_Fault, frozen=True, kw_only=True, tag="preempt"):
    """SIGTERM to the tray's agent; after ``notice_s`` it is killed, if it is still there."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)
    loses = True
    notice_s: float = 30.0


# -- the network
class Partition(_Fault, frozen=True, kw_only=True, tag="partition"):
    """``isolated``: nobody reaches it. ``one_way``: it hears, and is not heard. ``from_coordinator``: it reaches its peers only.
    ``from_peers``: it reaches the coordinator only. ``loud``: connections are refused, instead of falling silent."""

    family = Family.NETWORK
    strikes = (Subjects.TRAY, Subjects.RACK)
    lasts = True
    shape: Literal["isolated", "one_way", "from_coordinator", "from_peers"] = "isolated"
    loud: bool = False
    for_s: float | None = None


class Link(_Fault, frozen=True, kw_only=True, tag="link"):
    """Between an agent and the coordinator. ``lost``: share of packets. ``reset``: connections are, those that come too. ``half_open``: the
    coordinator's side has closed, and the agent does not learn of it. ``replies_lost``: the agent is heard, and what it is told is lost."""

    family = Family.NETWORK
    strikes = (Subjects.AGENT,)
    lasts = True
    latency_s: float = 0.0
    jitter_s: float = 0.0
    lost: float = 0.0
    bytes_per_s: float | None = None
    reset: bool = False
    half_open: bool = False
    replies_lost: bool = False
    for_s: float | None = None


# -- storage and corruption
class DiskFull(_Fault, frozen=True, kw_only=True, tag="disk_full"):
    """There is no room for more than what is there."""

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    for_s: float | None = None


class DiskFails(_Fault, frozen=True, kw_only=True, tag="disk_fails"):
    """``call`` ends in ``error``; with "slow" it takes ``slow_s`` longer, or until it is taken back; with "torn" half of what is written
    gets there, and nobody is told."""

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    call: Literal["write", "fsync", "rename", "read"] = "fsync"
    error: Literal["EIO", "ENOSPC", "EROFS", "slow", "torn"] = "EIO"
    slow_s: float = 1.0
    for_s: float | None = None


class FlipBit(_Fault, frozen=True, kw_only=True, tag="flip_bit"):
    """One bit, at a place that is drawn when it strikes."""

    family = Family.CORRUPTION
    strikes = (Subjects.RANK, Subjects.STORAGE)
    of: Literal["snapshot", "checkpoint", "parameters", "gradients"] = "snapshot"


# -- clocks, control, data
class StepClock(_Fault, frozen=True, kw_only=True, tag="step_clock"):
    """Its wall clock jumps. Nothing may change."""

    family = Family.CLOCK
    strikes = (Subjects.AGENT, Subjects.COORDINATOR)
    lasts = True
    by_s: float
    for_s: float | None = None


class Duplicate(_Fault, frozen=True, kw_only=True, tag="duplicate"):
    """A second one starts beside it."""

    family = Family.CONTROL
    strikes = (Subjects.COORDINATOR, Subjects.AGENT)
    lasts = True
    for_s: float | None = None


class PoisonBatch(_Fault, frozen=True, kw_only=True, tag="poison_batch"):
    """One sample raises, or turns the loss into NaN, wherever it is computed."""

    family = Family.DATA
    strikes = (Subjects.RANK,)
    how: Literal["raises", "nan"] = "raises"


Fault = (
    Kill
    | Raise
    | ExhaustMemory
    | CrashAt
    | Return
    | Pause
    | HoldGil
    | DelayCollective
    | Slow
    | Xid
    | GpuFails
    | Preempt
    | Partition
    | Link
    | DiskFull
    | DiskFails
    | FlipBit
    | StepClock
    | Duplicate
    | PoisonBatch
)


def all_faults() -> tuple[type[_Fault], ...]:
    return Fault.__args__


def name_of(fault: Fault | type[_Fault]) -> str:
    """As plans call it: ``kill``."""
    return str(fault.__struct_config__.tag)
