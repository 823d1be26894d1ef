"""The kinds of fault, as values. A fault says *what* goes wrong.

A `rackrun.chaos.faults.targets.Target` says where a fault strikes, and a trigger of the plan says when.

A fault that lasts is taken back by its injector after ``for_s`` seconds or, where ``for_s`` is None, when the plan
heals. `rackrun.chaos.injectors` carries faults out on a real machine; `rackrun.chaos.simulator` models them in virtual
time.
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


class _Fault(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="fault", forbid_unknown_fields=True, omit_defaults=True
):
    """The base of all faults."""

    family: ClassVar[Family]
    strikes: ClassVar[tuple[Subjects, ...]]
    lasts: ClassVar[bool] = False
    """The fault goes on until it is taken back, and then leaves no trace."""
    loses: ClassVar[bool] = False
    """A process struck by this fault does not come back by itself."""


_WORKERS = (Subjects.RANK, Subjects.SPARE)
_PROCESSES = (*_WORKERS, Subjects.AGENT, Subjects.TRAY, Subjects.RACK)


# -- processes
class Kill(_Fault, frozen=True, kw_only=True, tag="kill"):
    """A signal ends the process; the processes of a tray or a rack get it all at once."""

    family = Family.PROCESS
    strikes = (*_PROCESSES, Subjects.COORDINATOR)
    loses = True
    signal: Literal["KILL", "SEGV", "ABRT", "BUS", "TERM"] = "KILL"


class Raise(_Fault, frozen=True, kw_only=True, tag="raise"):
    """The step function raises an exception of the built-in class ``error``."""

    family = Family.PROCESS
    strikes = (Subjects.RANK,)
    loses = True
    error: str = "RuntimeError"


class ExhaustMemory(_Fault, frozen=True, kw_only=True, tag="exhaust_memory"):
    """The process allocates memory until the kernel kills it, in a memory cgroup of its own."""

    family = Family.PROCESS
    strikes = _WORKERS
    loses = True


class CrashAt(_Fault, frozen=True, kw_only=True, tag="crash_at"):
    """The process exits when it reaches ``point`` (`rackrun.chaos.faults.crash_points`) for the ``nth`` time.

    If it has already been there that often, it exits the next time.
    """

    family = Family.PROCESS
    strikes = (*_WORKERS, Subjects.AGENT, Subjects.COORDINATOR)
    loses = True
    point: str
    nth: int = 1


class Return(_Fault, frozen=True, kw_only=True, tag="return"):
    """Not a fault: an agent is started again for a tray that was lost."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)


# -- hangs and slowness
class Pause(_Fault, frozen=True, kw_only=True, tag="pause"):
    """The processes get SIGSTOP, and SIGCONT at the end. Whoever was given up meanwhile wakes up again and must do no
    harm."""

    family = Family.HANG
    strikes = (*_PROCESSES, Subjects.COORDINATOR)
    lasts = True
    for_s: float | None = None


class HoldGil(_Fault, frozen=True, kw_only=True, tag="hold_gil"):
    """The process holds the GIL for ``for_s`` seconds: no Python code runs in it, but its native threads do."""

    family = Family.HANG
    strikes = _WORKERS
    for_s: float = 2.0


class DelayCollective(_Fault, frozen=True, kw_only=True, tag="delay_collective"):
    """The rank enters its next collective ``for_s`` seconds late."""

    family = Family.HANG
    strikes = (Subjects.RANK,)
    for_s: float = 2.0


class Slow(_Fault, frozen=True, kw_only=True, tag="slow"):
    """The processes get only the share ``share`` (between 0 and 1) of a processor."""

    family = Family.SLOW
    strikes = (*_WORKERS, Subjects.TRAY)
    lasts = True
    share: float = 0.3
    for_s: float | None = None


# -- hardware
class Xid(_Fault, frozen=True, kw_only=True, tag="xid"):
    """The GPU's driver reports the Xid error ``code``; `rackrun.topology` says what each code means."""

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    code: int
    for_s: float | None = None


class GpuFails(_Fault, frozen=True, kw_only=True, tag="gpu_fails"):
    """The GPU's driver answers queries about the GPU with an error or a bad state.

    ``lost``, ``reset``, ``reboot`` and ``drain_p2p`` are the driver's own words. ``row``: a remapped memory row waits
    for a reset. ``sram``: the SRAM has too many errors. ``ecc``: one error was corrected, which has no consequences.
    ``link``: an NVLink is down. ``fabric``: the GPU's registration with the fabric is gone.
    """

    family = Family.HARDWARE
    strikes = (Subjects.RANK, Subjects.SPARE)
    lasts = True
    says: Literal["lost", "reset", "reboot", "drain_p2p", "row", "sram", "ecc", "link", "fabric"]
    for_s: float | None = None


class Preempt(_Fault, frozen=True, kw_only=True, tag="preempt"):
    """The tray's agent gets SIGTERM; if it is alive after ``notice_s`` seconds, the tray's processes are killed."""

    family = Family.HARDWARE
    strikes = (Subjects.TRAY,)
    loses = True
    notice_s: float = 30.0


# -- the network
class Partition(_Fault, frozen=True, kw_only=True, tag="partition"):
    """The network between a tray or a rack and the others is cut.

    ``isolated``: no traffic in either direction. ``one_way``: it receives, but what it sends is lost.
    ``from_coordinator``: it reaches only its peers. ``from_peers``: it reaches only the coordinator. ``loud``:
    connections are refused instead of falling silent.
    """

    family = Family.NETWORK
    strikes = (Subjects.TRAY, Subjects.RACK)
    lasts = True
    shape: Literal["isolated", "one_way", "from_coordinator", "from_peers"] = "isolated"
    loud: bool = False
    for_s: float | None = None


class Link(_Fault, frozen=True, kw_only=True, tag="link"):
    """The link between an agent and the coordinator is bad.

    ``latency_s`` and ``jitter_s``: delay in seconds, fixed and random. ``lost``: the share of packets that is lost.
    ``bytes_per_s``: the bandwidth. ``reset``: connections are reset, new ones included. ``half_open``: the
    coordinator's side is closed and the agent does not learn of it. ``replies_lost``: what the agent sends arrives,
    what is sent to it is lost.
    """

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
    """The file system has no room for anything beyond what it holds already."""

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    for_s: float | None = None


class DiskFails(_Fault, frozen=True, kw_only=True, tag="disk_fails"):
    """A file call on checkpoint storage fails: ``call`` ends with ``error``.

    With "slow" the call takes ``slow_s`` seconds longer, or until the fault is taken back. With "torn" only half of the
    data is written, and the call succeeds.
    """

    family = Family.STORAGE
    strikes = (Subjects.STORAGE,)
    lasts = True
    call: Literal["write", "fsync", "rename", "read"] = "fsync"
    error: Literal["EIO", "ENOSPC", "EROFS", "slow", "torn"] = "EIO"
    slow_s: float = 1.0
    for_s: float | None = None


class FlipBit(_Fault, frozen=True, kw_only=True, tag="flip_bit"):
    """One bit is flipped, at a place drawn when the fault strikes."""

    family = Family.CORRUPTION
    strikes = (Subjects.RANK, Subjects.STORAGE)
    of: Literal["snapshot", "checkpoint", "parameters", "gradients"] = "snapshot"


# -- clocks, control, data
class StepClock(_Fault, frozen=True, kw_only=True, tag="step_clock"):
    """The wall clock of the process jumps by ``by_s`` seconds. This must change nothing."""

    family = Family.CLOCK
    strikes = (Subjects.AGENT, Subjects.COORDINATOR)
    lasts = True
    by_s: float
    for_s: float | None = None


class Duplicate(_Fault, frozen=True, kw_only=True, tag="duplicate"):
    """A second process of the same kind is started beside the first."""

    family = Family.CONTROL
    strikes = (Subjects.COORDINATOR, Subjects.AGENT)
    lasts = True
    for_s: float | None = None


class PoisonBatch(_Fault, frozen=True, kw_only=True, tag="poison_batch"):
    """One sample raises, or turns the loss into NaN, on whichever rank computes it."""

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
    """Return the classes of all faults."""
    return Fault.__args__


def name_of(fault: Fault | type[_Fault]) -> str:
    """Return the fault's name in plans: ``kill``."""
    return str(fault.__struct_config__.tag)
