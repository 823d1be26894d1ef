"""Functions that build a chaos plan in Python.

::

    make_plan(
        inject(Kill(), one("rank"), step=6),
        quiet(5),
        every(10.0, inject(Pause(for_s=2.0), one("tray")), times=3),
        heal(),
        slots=1,
    )

Each function returns the value of the same name in `rackrun.chaos.plan.definition` or `rackrun.chaos.faults.targets`.
`make_plan` refuses a plan that makes no sense.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import BuddyOf, Exactly, Last, Majority, Minority, NeighbourOf, One, Several, Target
from rackrun.chaos.plan.definition import (
    AtPoint,
    AtStep,
    AtTime,
    Budget,
    Burst,
    Every,
    FlipFlop,
    Heal,
    Inject,
    Now,
    Par,
    Part,
    Plan,
    Quiet,
    Seq,
    Swizzle,
    plan_from,
)

__all__ = [
    "buddy_of",
    "burst",
    "every",
    "exactly",
    "flip_flop",
    "heal",
    "inject",
    "last",
    "majority",
    "make_plan",
    "minority",
    "neighbour_of",
    "one",
    "par",
    "quiet",
    "seq",
    "several",
    "swizzle",
]

Kind = Literal["rank", "spare", "agent", "tray", "rack", "coordinator", "storage"] | Subjects


def make_plan(
    *parts: Part,
    seed: int = 0,
    expect: Literal["survives", "stops"] = "survives",
    slots: int | None = None,
    trays: int | None = None,
    name: str = "",
) -> Plan:
    """Return a plan that runs ``parts`` one after another. Raises `PlanError` if the plan makes no sense.

    ``slots`` and ``trays`` limit how many of each may be lost at the same time.
    """
    if not parts:
        raise PlanError("the plan has no parts.", remedy="give it at least one.")
    whole = parts[0] if len(parts) == 1 else Seq(parts=parts)
    plan = Plan(plan=whole, seed=seed, expect=expect, budget=Budget(slots=slots, trays=trays), name=name)
    return plan_from(msgspec.to_builtins(plan))


# -- what is done
def inject(
    fault: Fault,
    target: Target,
    *,
    step: int | None = None,
    point: str | None = None,
    nth: int = 1,
    time_s: float | None = None,
    plus_s: float = 0.0,
) -> Inject:
    """Return a part that strikes ``target`` once with ``fault``.

    The strike is due when ``step`` is committed, when processes have reached ``point`` ``nth`` times, or ``time_s``
    seconds after the first step; without any of these, when the part's turn comes. ``plus_s`` delays it by that many
    seconds. Raises `PlanError` if more than one moment is given, or ``plus_s`` with ``point`` or ``time_s``.
    """
    if sum(at is not None for at in (step, point, time_s)) > 1:
        raise PlanError(
            "more than one of step, point and time_s is given, and a fault strikes at one moment.",
            remedy="give one of them.",
        )
    if step is not None:
        return Inject(fault=fault, target=target, when=AtStep(step=step, plus_s=plus_s))
    if plus_s and (point is not None or time_s is not None):
        raise PlanError("plus_s counts from a step, or from the part's turn.", remedy="leave it out.")
    if point is not None:
        return Inject(fault=fault, target=target, when=AtPoint(point=point, nth=nth))
    if time_s is not None:
        return Inject(fault=fault, target=target, when=AtTime(s=time_s))
    return Inject(fault=fault, target=target, when=Now(plus_s=plus_s))


def seq(*parts: Part) -> Seq:
    """Return a part that runs ``parts`` one after another: each begins when the turn of the one before is over.

    The turn of a fault with ``for_s`` is over when the fault has been taken back.
    """
    return Seq(parts=parts)


def par(*parts: Part) -> Par:
    """Return a part that runs all ``parts`` at the same time."""
    return Par(parts=parts)


def every(mean_s: float, part: Part, times: int | None = None) -> Every:
    """Return a part that repeats ``part``, ``times`` times or until the job ends, with waits of ``mean_s`` seconds on
    average."""
    return Every(mean_s=mean_s, part=part, times=times)


def burst(times: int, within_s: float, part: Part) -> Burst:
    """Return a part that runs ``part`` ``times`` times, at random moments within ``within_s`` seconds."""
    return Burst(times=times, within_s=within_s, part=part)


def flip_flop(fault: Fault, target: Target, *, on_s: float, off_s: float, times: int = 1) -> FlipFlop:
    """Return a part in which a fault that lasts is in force for ``on_s`` and absent for ``off_s`` seconds, ``times``
    times."""
    return FlipFlop(fault=fault, target=target, on_s=on_s, off_s=off_s, times=times)


def swizzle(fault: Fault, target: Target, *, over_s: float) -> Swizzle:
    """Return a part in which a fault that lasts strikes its subjects one by one and is taken back in another order.

    Each of the two phases happens at random moments within ``over_s`` seconds.
    """
    return Swizzle(fault=fault, target=target, over_s=over_s)


def heal() -> Heal:
    """Return a part that takes back every fault in force."""
    return Heal()


def quiet(steps: int) -> Quiet:
    """Return a part that strikes nothing until ``steps`` more steps, or the job's last step, are committed."""
    return Quiet(steps=steps)


# -- to whom
def one(of: Kind) -> One:
    """Return a target: one random subject of this kind, among those that exist at the moment of the strike."""
    return One(_kind(of))


def several(of: Kind, count: int) -> Several:
    """Return a target: ``count`` random subjects of this kind."""
    return Several(_kind(of), count)


def minority(of: Kind) -> Minority:
    """Return a target: the largest number of random subjects of this kind that is fewer than half."""
    return Minority(_kind(of))


def majority(of: Kind) -> Majority:
    """Return a target: the smallest number of random subjects of this kind that is more than half."""
    return Majority(_kind(of))


def exactly(kind: Kind, *names: str | int) -> Exactly:
    """Return a target: the subjects with these names.

    Ranks are named by number, spares by slot, trays and agents by tray; the coordinator has no name.
    """
    return Exactly(_kind(kind), _names(names))


def last(of: Kind) -> Last:
    """Return a target: the subject of this kind that was struck last."""
    return Last(_kind(of))


def neighbour_of(whom: Target) -> NeighbourOf:
    """Return a target: another subject of the same kind in the same NVLink clique, on the same tray if there is one."""
    return NeighbourOf(whom)


def buddy_of(whom: Target) -> BuddyOf:
    """Return a target: the subject that keeps the snapshots of ``whom``."""
    return BuddyOf(whom)


def _kind(of: Kind) -> Subjects:
    if of not in list(Subjects):
        raise PlanError(f"there is no kind {of!r} of things to strike.", remedy=f"give one of {', '.join(Subjects)}.")
    return Subjects(of)


def _names(names: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(map(str, names)) or ("",)
