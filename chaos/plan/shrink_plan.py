"""Make a failing plan smaller: fewer faults first, then simpler ones, then shorter ones.

A function of the caller's decides whether a candidate plan still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from rackrun.chaos.faults.fault_types import BaseFault, Subjects
from rackrun.chaos.faults.table.fault_table import PLAIN_LOSS, row_of
from rackrun.chaos.faults.targets import Exactly
from rackrun.chaos.plan.definition import AtStep, Heal, Inject, Par, Part, Plan, Seq

__all__ = ["fewest", "shrink"]

P = TypeVar("P")
T = TypeVar("T")


def fewest(parts: list[P], best: T, fails: Callable[[list[P]], T | None], tries: int) -> tuple[list[P], T]:
    """Leave out halves, then quarters and so on down to single parts, as long as the rest still fails.

    ``fails`` returns the failure, or None if the parts do not fail. ``best`` is the failure of ``parts``. ``fails`` is
    called ``tries`` times at most. Returns the parts that are left, and their failure.
    """
    size = max(len(parts) // 2, 1)
    while parts and tries > 0:
        for at in range(0, len(parts), size):
            rest = parts[:at] + parts[at + size :]
            tries -= 1
            if (found := fails(rest)) is not None:
                parts, best = rest, found
                size = min(size, max(len(parts), 1))
                break
            if tries <= 0:
                break
        else:
            if size == 1:
                break
            size //= 2
    return parts, best


def shrink(plan: Plan, best: T, fails: Callable[[Plan], T | None], tries: int = 200) -> tuple[Plan, T]:
    """Return the smallest failing plan that was found, and its failure.

    ``plan`` is known to fail with ``best``. ``fails`` returns the failure of a plan, or None. The same answers of
    ``fails`` lead to the same candidates, so a caller that stores the answers can stop and continue later.
    """
    whole = plan.plan
    parts: list[Part] = list(whole.parts) if isinstance(whole, Par | Seq) else [whole]
    holds = Seq if isinstance(whole, Seq) else Par

    def of(some: list[Part]) -> Plan:
        return msgspec.structs.replace(plan, plan=holds(parts=tuple(some)) if some else Heal())

    asked = 0

    def ask(some: list[Part]) -> T | None:
        nonlocal asked
        asked += 1
        return fails(of(some))

    parts, best = fewest(parts, best, ask, tries)
    moved = True
    while moved and asked < tries:
        moved = False
        for index, part in enumerate(parts):
            for candidate in _simpler(part):
                changed = [*parts[:index], candidate, *parts[index + 1 :]]
                found = ask(changed) if asked < tries else None
                if found is not None:
                    parts, best, moved = changed, found, True
                    break
            if moved:
                break
    return of(parts), best


def _simpler(part: Part) -> Iterator[Part]:
    """Yield variants of ``part`` that are simpler in one respect, so that no sequence of variants leads back to
    ``part``."""
    if not isinstance(part, Inject):
        return
    for fault in _simpler_faults(part.fault, part.target.kind if isinstance(part.target, Exactly) else None):
        yield msgspec.structs.replace(part, fault=fault)
    if isinstance(part.target, Exactly) and len(part.target.names) > 1:
        for name in part.target.names:
            yield msgspec.structs.replace(part, target=Exactly(part.target.kind, (name,)))
    if isinstance(part.when, AtStep) and part.when.plus_s > 0:
        yield msgspec.structs.replace(part, when=AtStep(step=part.when.step))


def _simpler_faults(fault: BaseFault, kind: Subjects | None) -> Iterator[BaseFault]:
    if fault.loses and fault != PLAIN_LOSS and (kind is None or kind in PLAIN_LOSS.strikes):
        yield PLAIN_LOSS
    yield from row_of(fault).simpler(fault)
