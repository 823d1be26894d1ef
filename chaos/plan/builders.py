"""Plans in Python, as short as they are told::

    make_plan(
        inject(Kill(), one("rank"), step=6),
        quiet(5),
        every(10.0, inject(Pause(for_s=2.0), one("tray")), times=3),
        heal(),
        slots=1,
    )

Each is the value of `rackrun.chaos.plan.definition` or `rackrun.chaos.faults.targets` of the same name; what means nothing is refused by `make_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.faults.fault_types import Fault, Subjects
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
    """``parts``, one after another. ``slots``, ``trays``: never more than that gone at once. Raises `PlanError`."""
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
    """``fault`` once, at ``target``: when ``step`` is committed, when some process comes to ``point`` for the ``nth`` time, ``time_s`` after the
    first step, or else when its turn has come; ``plus_s`` later. Raises `PlanError` for more than one of these."""
    if sum(at is not None for at in (step, point, time_s)) > 1:
        raise PlanError("a fault strikes at one moment.", remedy="give one of step, point and time_s.")
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
    """One after another: the next begins when the turn of the one before is over; that of a fault with ``for_s``, when it has been taken back."""
    return Seq(parts=parts)


def par(*parts: Part) -> Par:
    """All at the same time."""
    return Par(parts=parts)


def every(mean_s: float, part: Part, times: int | None = None) -> Every:
    """``part`` again and again, after times that are ``mean_s`` on average; ``times``, or until the job ends."""
    return Every(mean_s=mean_s, part=part, times=times)


def burst(times: int, within_s: float, part: Part) -> Burst:
    """``part`` so many ``times``, at random moments ``within_s`` seconds."""
    return Burst(times=times, within_s=within_s, part=part)


def flip_flop(fault: Fault, target: Target, *, on_s: float, off_s: float, times: int = 1) -> FlipFlop:
    """A fault that lasts is there for ``on_s``, and not for ``off_s``, ``times``."""
    return FlipFlop(fault=fault, target=target, on_s=on_s, off_s=off_s, times=times)


def swizzle(fault: Fault, target: Target, *, over_s: float) -> Swizzle:
    """A fault that lasts strikes its subjects one by one, and is taken back in another order."""
    return Swizzle(fault=fault, target=target, over_s=over_s)


def heal() -> Heal:
    """All that lasts is taken back."""
    return Heal()


def quiet(steps: int) -> Quiet:
    """Nothing, until so many more steps, or the job's last, are committed."""
    return Quiet(steps=steps)


# -- to whom
def one(of: Kind) -> One:
    """A random one, of those there are when the fault strikes."""
    return One(_kind(of))


def several(of: Kind, count: int) -> Several:
    """So many random ones."""
    return Several(_kind(of), count)


def minority(of: Kind) -> Minority:
    """As many as can be, but fewer than half."""
    return Minority(_kind(of))


def majority(of: Kind) -> Majority:
    """As few as can be, but more than half."""
    return Majority(_kind(of))


def exactly(kind: Kind, *names: str | int) -> Exactly:
    """These: ranks by number, spares by slot, trays and agents by tray; the coordinator has no name."""
    return Exactly(_kind(kind), _names(names))


def last(of: Kind) -> Last:
    """The one that was struck last."""
    return Last(_kind(of))


def neighbour_of(whom: Target) -> NeighbourOf:
    """Another one in the same NVLink clique, on the same tray if there is one."""
    return NeighbourOf(whom)


def buddy_of(whom: Target) -> BuddyOf:
    """Who keeps its snapshots."""
    return BuddyOf(whom)


def _kind(of: Kind) -> Subjects:
    if of not in list(Subjects):
        raise PlanError(f"there is no kind {of!r} of things to strike.", remedy=f"give one of {', '.join(Subjects)}.")
    return Subjects(of)


def _names(names: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(map(str, names)) or ("",)
