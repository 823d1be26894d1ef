"""FlipBit: one bit of a job's state or of its copies is flipped."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import (
    FaultRow,
    HookPlace,
    HookVisit,
    InProcess,
    Need,
    ProcessAction,
    StrikeCost,
    always,
)
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Injected, Machine, StrikeTools
from rackrun.chaos.faults.targets import A_RANK, THE_STORAGE
from rackrun.chaos.faults.virtual_strike import VirtualStrike

__all__ = ["ROW", "FlipBit"]

_CORRUPT: tuple[Literal["parameters", "gradients"], ...] = ("parameters", "parameters", "parameters", "gradients")


class FlipBit(BaseFault, frozen=True, kw_only=True, tag="flip_bit"):
    """One bit is flipped, at a place drawn when the fault strikes."""

    family = Family.CORRUPTION
    strikes = (Subjects.RANK, Subjects.STORAGE)
    of: Literal["snapshot", "checkpoint", "parameters", "gradients"] = "snapshot"


def _inject(fault: FlipBit, tools: StrikeTools) -> Injected:
    match fault.of:
        case "checkpoint":
            return tools.flip_in_checkpoint()
        case "snapshot":
            return tools.flip_in_snapshot()
        case _:
            return tools.order(fault)


def _refusal(fault: FlipBit, kind: Subjects, _: Machine) -> Complaint | None:
    if (fault.of == "checkpoint") != (kind is Subjects.STORAGE):
        return f"a {kind} has no {fault.of}", "name the storage for a checkpoint, and a rank for all else"
    return None


def _due(fault: FlipBit, visit: HookVisit) -> bool:
    return (fault.of, visit.place) in (("parameters", HookPlace.STEP), ("gradients", HookPlace.UPDATE))


def _flip(fault: FlipBit, process: InProcess) -> None:
    process.flip_parameters() if fault.of == "parameters" else process.flip_gradients()


def _simulate(fault: FlipBit, strike: VirtualStrike) -> bool:
    if strike.subject.kind is Subjects.STORAGE:
        return strike.damage_checkpoint()
    if fault.of == "snapshot":
        return strike.each(worker=lambda _: strike.damage_snapshot())
    return strike.each(worker=lambda _: strike.flip(in_gradients=fault.of == "gradients"))


def _unsure(fault: FlipBit, _: Subjects, alone: bool) -> str:
    if fault.of in ("parameters", "gradients"):
        return f"a flipped bit of the {fault.of} is found by some jobs only"
    return "" if alone else f"the {fault.of} may be the copy that the other faults leave"


ROW = FaultRow(
    example=FlipBit(of="parameters"),
    how="in parameters or gradients; in a snapshot or a checkpoint, from outside",
    inject=_inject,
    refusal=_refusal,
    inside=ProcessAction(_due, _flip),
    needs=lambda fault: frozenset({Need.SNAPSHOTS} if fault.of == "snapshot" else ()),
    simulate=_simulate,
    cost=always(StrikeCost.NOTHING),
    unsure=_unsure,
    justifies_loss=always(True),
    draw=lambda d: d.choice([(FlipBit(of="snapshot"), A_RANK), (FlipBit(of="checkpoint"), THE_STORAGE)]),
    variants={
        Profile.ROT: lambda *_: [(FlipBit(), A_RANK)],
        Profile.DISK: lambda *_: [(FlipBit(of="checkpoint"), THE_STORAGE)],
        Profile.DAMAGED_CHECKPOINT: lambda *_: [(FlipBit(of="checkpoint"), THE_STORAGE)],
        Profile.CORRUPT_STATE: lambda d, _: [(FlipBit(of=d.choice(_CORRUPT)), A_RANK)],
        Profile.CORRUPT_PARAMETERS: lambda *_: [(FlipBit(of="parameters"), A_RANK)],
    },
)
