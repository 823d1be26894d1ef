"""ExhaustMemory: a process runs out of memory, and the kernel kills it."""

from __future__ import annotations

from rackrun.chaos.faults.fault_row import FaultRow, HookPlace, InProcess, ProcessAction, StrikeCost, always
from rackrun.chaos.faults.fault_types import WORKERS, BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Machine
from rackrun.chaos.faults.targets import A_RANK

__all__ = ["MEMORY_BYTES", "ROW", "ExhaustMemory"]

MEMORY_BYTES = 64 << 20
"""Bytes that a process may allocate, in a cgroup of its own, before the kernel kills it."""


class ExhaustMemory(BaseFault, frozen=True, kw_only=True, tag="exhaust_memory"):
    """The process allocates memory until the kernel kills it, in a memory cgroup of its own."""

    family = Family.PROCESS
    strikes = WORKERS
    loses = True


def _refusal(_: ExhaustMemory, kind: Subjects, machine: Machine) -> Complaint | None:
    if kind is not Subjects.RANK:
        return "memory is allocated in a step, and a spare does none", "name a rank"
    if not machine.can_limit_memory():
        return (
            "no control group can be made that limits memory, and a limit of the process ends in an exception",
            "run as root, or in a control group of yours; or use raise with MemoryError",
        )
    return None


def _allocate(_: ExhaustMemory, process: InProcess) -> None:
    process.tell(f"allocates in step {process.step()}")
    taken = [b"\1" * (1 << 20) for _ in range(4 * MEMORY_BYTES >> 20)]  # bounded, since the cgroup may be gone
    del taken


ROW = FaultRow(
    example=ExhaustMemory(),
    how="in a memory control group of its own",
    inject=lambda fault, tools: tools.order_under_memory_limit(fault),
    refusal=_refusal,
    inside=ProcessAction(lambda _, visit: visit.place is HookPlace.STEP, _allocate),
    simulate=lambda _, strike: strike.each(worker=lambda worker: worker.end(signal=9)),
    cost=always(StrikeCost.SUBJECTS),
    justifies_loss=always(True),
    draw=lambda _: (ExhaustMemory(), A_RANK),
    variants={
        Profile.KILLS: lambda *_: [(ExhaustMemory(), A_RANK)],
        Profile.FEW_WORKERS: lambda *_: [(ExhaustMemory(), A_RANK)],
    },
)
