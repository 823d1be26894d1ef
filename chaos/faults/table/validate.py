"""Check that a fault and its target make sense in any job: finite numbers, named targets, exceptions that exist."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Subjects
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.faults.targets import NAMELESS, BuddyOf, Exactly, NeighbourOf, Several, Target

__all__ = ["nonsense_of", "not_finite"]

_KEEPERS = (Subjects.RANK, Subjects.TRAY, Subjects.AGENT)


def nonsense_of(fault: BaseFault, target: Target) -> Complaint | None:
    """Return what is wrong with the fault or its target, or None if nothing is."""
    return not_finite(fault) or _of_fault(fault) or _of_target(target)[1]


def not_finite(value: msgspec.Struct) -> Complaint | None:
    """Return a complaint about the first field that is infinite or NaN, or None."""
    for name in value.__struct_fields__:
        number = getattr(value, name)
        if isinstance(number, float) and not math.isfinite(number):
            return f"{name} is {number}", "give a number"
    return None


def _of_fault(fault: BaseFault) -> Complaint | None:
    for name in fault.__struct_fields__:
        value = getattr(fault, name)
        if name.endswith("_s") and name != "by_s" and value is not None and value < 0:
            return f"{name} is {value}", "give 0 or more"
    return row_of(fault).nonsense(fault)


def _of_target(target: Target) -> tuple[Subjects, Complaint | None]:
    """Return the kind of the target's subjects, and what is wrong with the target, or None."""
    match target:
        case Exactly(kind, names):
            return kind, _of_names(kind, names)
        case NeighbourOf(whom):
            kind, found = _of_target(whom)
            alone = (f"the {kind} has no neighbour", "name a rank, a spare, an agent, a tray or a rack")
            return kind, found or (alone if kind in NAMELESS else None)
        case BuddyOf(whom):
            kind, found = _of_target(whom)
            return kind, found or (None if kind in _KEEPERS else (f"a {kind} has no buddy", "name a rank or a tray"))
        case Several(kind, count) if count < 1:
            return kind, (f"{count} {kind}s", "strike at least one")
        case _:
            return target.of, None


def _of_names(kind: Subjects, names: tuple[str, ...]) -> Complaint | None:
    if kind in NAMELESS:
        return None if names == ("",) else (f"the {kind} has no name", "leave out names")
    if not all(names) or not names:
        return f"{kind}s without names", "give them: ranks by number, spares by slot, agents and trays by tray"
    name, times = Counter(names).most_common(1)[0]
    return (f"{kind} {name} is named twice", "name it once") if times > 1 else None
