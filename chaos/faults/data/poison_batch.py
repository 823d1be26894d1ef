"""PoisonBatch: a sample raises, or spoils the loss, on whichever rank computes it."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import FaultRow, HookPlace, InProcess, ProcessAction, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import A_RANK
from rackrun.chaos.faults.virtual_strike import VirtualStrike

__all__ = ["ROW", "PoisonBatch"]


class PoisonBatch(BaseFault, frozen=True, kw_only=True, tag="poison_batch"):
    """One sample raises, or turns the loss into NaN, on whichever rank computes it."""

    family = Family.DATA
    strikes = (Subjects.RANK,)
    how: Literal["raises", "nan"] = "raises"


def _poison(fault: PoisonBatch, process: InProcess) -> None:
    process.poison(fault.how, "raises" if fault.how == "raises" else "makes the loss NaN")


def _simulate(_: PoisonBatch, strike: VirtualStrike) -> bool:
    return strike.each(worker=lambda worker: strike.poison(worker.passed + 2))


ROW = FaultRow(
    example=PoisonBatch(),
    how="in whichever worker computes the sample",
    inject=lambda fault, tools: tools.order(fault),
    inside=ProcessAction(lambda _, visit: visit.place is HookPlace.SAMPLES, _poison),
    simulate=_simulate,
    not_simulated=lambda fault, _: "" if fault.how == "raises" else "it has no losses",
    cost=always(StrikeCost.SUBJECTS),
    hopeless=lambda fault: (
        "a sample that raises wherever it is computed is the script's own error" if fault.how == "raises" else ""
    ),
    unsure=always("what a script makes of a NaN is its own"),
    justifies_loss=always(True),
    endangers_all=always(True),
    draw=lambda _: (PoisonBatch(), A_RANK),
    variants={
        Profile.ERRORS: lambda *_: [(PoisonBatch(), A_RANK)],
        Profile.SCRIPT_BUG: lambda *_: [(PoisonBatch(), A_RANK)],
    },
)
