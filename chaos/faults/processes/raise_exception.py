"""Raise: the step function raises an exception."""

from __future__ import annotations

import builtins

from rackrun.chaos.faults.fault_row import FaultRow, HookPlace, InProcess, ProcessAction, StrikeCost, always
from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import A_RANK
from rackrun.chaos.faults.virtual_strike import VirtualStrike

__all__ = ["ROW", "Raise"]


class Raise(BaseFault, frozen=True, kw_only=True, tag="raise"):
    """The step function raises an exception of the built-in class ``error``."""

    family = Family.PROCESS
    strikes = (Subjects.RANK,)
    loses = True
    error: str = "RuntimeError"


def _nonsense(fault: Raise) -> Complaint | None:
    if _can_be_raised(fault.error):
        return None
    return (
        f"there is no error {fault.error!r}",
        "name one of Python's own that takes a text: ValueError, OSError, ...",
    )


def _can_be_raised(name: str) -> bool:
    """Whether ``name`` is a built-in exception that can be made from one text."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return False
    try:
        kind("chaos")
    except TypeError:
        return False
    return True


def _raise(fault: Raise, process: InProcess) -> None:
    process.tell(f"{fault.error} in step {process.step()}")
    raise getattr(builtins, fault.error, RuntimeError)(f"chaos: raised in step {process.step()}")


def _simulate(fault: Raise, strike: VirtualStrike) -> bool:
    return strike.each(worker=lambda worker: worker.end(code=1, bug=f"train.py:{strike.number} ({fault.error})"))


ROW = FaultRow(
    example=Raise(),
    how="in the step function",
    inject=lambda fault, tools: tools.order(fault),
    nonsense=_nonsense,
    inside=ProcessAction(lambda _, visit: visit.place is HookPlace.STEP, _raise),
    simulate=_simulate,
    cost=always(StrikeCost.SUBJECTS),
    looks_like=lambda fault: fault.error,
    justifies_loss=always(True),
    draw=lambda d: (Raise(error=d.choice(["RuntimeError", "ValueError", "OSError", "MemoryError"])), A_RANK),
    variants={
        Profile.ERRORS: lambda *_: [(Raise(), A_RANK), (Raise(error="ValueError"), A_RANK)],
        Profile.ANY_SCRIPT_LOSES: lambda *_: [(Raise(), A_RANK)],
    },
    in_soak={"raise": Raise()},
)
