"""Judge before a run whether a job can survive a plan: *survivable*, *beyond*, or *unclear*.

Only certain cases get one of the first two labels. *Survivable*: at whatever moments the faults strike, enough spares,
free slots and copies of the state are left for all of them, and the job must end with the same bits as without faults.
*Beyond*: the job cannot go on and must stop with a reason. *Unclear*: the result depends on the moment of the strikes,
or nothing guarantees it; for such a plan, its own ``expect`` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, TypeAlias, assert_never

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.job_layout import JobLayout
from rackrun.chaos.faults.fault_row import StrikeCost
from rackrun.chaos.faults.fault_types import BaseFault, Subjects, name_of
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.faults.targets import BuddyOf, Exactly, Last, Majority, Minority, NeighbourOf, One, Several, Target
from rackrun.chaos.plan.definition import (
    AtStep,
    Burst,
    Every,
    FlipFlop,
    Inject,
    Part,
    Plan,
    Seq,
    Swizzle,
    Trigger,
    kind_of,
    parts_of,
)
from rackrun.chaos.plan.definition import Par as Together

__all__ = [
    "BEGUN_STEPS",
    "Survivability",
    "Label",
    "check_budget",
    "check_targets",
    "judge_plan",
]

BEGUN_STEPS = 10
"""A job that has committed fewer steps than this starts again from the beginning by itself when all is lost."""
_STRIKES_A_SLOT = 3
"""A slot that has failed this often is not used again."""
_LOSSES_MAX = 7
"""The most losses that are certainly survivable.

Eight recoveries without a step between them stop a job, and all losses might come at once.
"""


class Label(StrEnum):
    """What is known before a run about its end."""

    SURVIVABLE = "survivable"
    BEYOND = "beyond"
    UNCLEAR = "unclear"


class Survivability(NamedTuple):
    """A label, and the reason for it."""

    label: Label
    because: str


class _Toll(NamedTuple):
    """What one strike takes from the job."""

    workers: int = 0
    """The most workers lost, each for as long as another worker takes to start in its slot."""
    slots: int = 0
    """The most slots lost for good."""
    trays: int = 0
    """The most trays lost."""
    surely: bool = True
    """The strike takes exactly these numbers, all at once, rather than at most these."""


def judge_plan(plan: Plan, layout: JobLayout) -> Survivability:
    """Compare what the plan may take with what the job has, and return the label with its reason."""
    strikes = list(_strikes(plan.plan, 1))
    for fault, target, _, _ in strikes:
        if why := _ends(fault, kind_of(target)):
            return Survivability(Label.BEYOND, why)
    for fault, target, _, times in strikes:
        if why := _unsure(fault, kind_of(target), times, alone=len(strikes) == 1):
            return Survivability(Label.UNCLEAR, why)
    if why := _alike(strikes, layout):
        return Survivability(Label.UNCLEAR, why)
    tolls = [(_toll(fault, target, layout), when, times or 1) for fault, target, when, times in strikes]
    workers, slots, trays = (sum(toll[i] * times for toll, _, times in tolls) for i in range(3))
    for toll, when, times in tolls:
        if _takes_all(toll, layout):
            alone = times == 1 and workers <= toll.workers and trays <= toll.trays and not slots
            return _all_lost(toll, when, layout, alone=alone)
    if trays:
        surely = any(toll.trays and toll.surely for toll, _, _ in tolls)
        return _trays_lost(trays, workers + slots, layout, surely=surely)
    return _workers_lost(workers, slots, layout)


def check_budget(plan: Plan, layout: JobLayout | None) -> None:
    """Raise `PlanError` if the plan expects an end that is impossible. A ``layout`` of None is not judged."""
    if layout is None:
        return
    label, because = judge_plan(plan, layout)
    if label is Label.BEYOND and plan.expect == "survives":
        raise PlanError(
            f"the plan expects that the job survives, which cannot be: {because}.",
            remedy="say expect: stops, or give the job more spares, trays or a --checkpoint-dir.",
        )
    if label is Label.SURVIVABLE and plan.expect == "stops":
        raise PlanError(
            f"the plan expects that the job stops, and it has all it takes to go on: {because}.",
            remedy="say expect: survives, or take more from it.",
        )


def check_targets(plan: Plan, *, ranks: int, spares: int, trays: int | None) -> None:
    """Raise `PlanError` if the plan names a target that a job of this size never has."""
    there = {
        Subjects.RANK: [str(rank) for rank in range(ranks)],
        Subjects.TRAY: [f"tray-{tray:02d}" for tray in range(trays or 1)],
    }
    there[Subjects.AGENT] = there[Subjects.TRAY]

    def refuse(what: str, kind: Subjects) -> None:
        names = there.get(kind)
        has = f"its {kind}s are {', '.join(names)}" if names else f"it has {spares} spare{'' if spares == 1 else 's'}"
        raise PlanError(f"the job never has {what}: {has}.", remedy="name one that there is, or make the job larger.")

    def look(target: Target) -> None:
        match target:
            case Exactly(kind, names) if kind in there:
                for name in names:
                    if name not in there[kind]:
                        refuse(f"a {kind} {name}", kind)
            case One(Subjects.SPARE) if not spares:
                refuse("a spare", Subjects.SPARE)
            case Several(kind, count):
                most = spares if kind is Subjects.SPARE else len(there.get(kind, ())) or count
                if count > most:
                    refuse(f"{count} {kind}s", kind)
            case NeighbourOf(whom) | BuddyOf(whom):
                look(whom)
            case _:
                pass

    for part in parts_of(plan.plan):
        if isinstance(part, Inject | FlipFlop | Swizzle):
            look(part.target)


# -- what strikes
_Struck: TypeAlias = tuple[BaseFault, Target, Trigger | None, int | None]


def _strikes(part: Part, times: int | None) -> Iterator[_Struck]:
    """Yield each strike with its trigger and the number of times it comes; None: the number is unknown."""
    match part:
        case Inject(fault=fault, target=target, when=when):
            yield fault, target, when, times
        case FlipFlop(fault=fault, target=target):
            yield fault, target, None, times and times * part.times
        case Swizzle(fault=fault, target=target):
            yield fault, target, None, times
        case Seq(parts=parts) | Together(parts=parts):
            for inner in parts:
                yield from _strikes(inner, times)
        case Every(part=inner) | Burst(part=inner):
            yield from _strikes(inner, times and part.times and times * part.times)
        case _:
            pass


def _ends(fault: BaseFault, kind: Subjects) -> str:
    """Return why no job survives this fault, or an empty text."""
    if kind is Subjects.COORDINATOR and fault.loses:
        return "the coordinator and the launcher are one process, and nobody takes its place"
    return row_of(fault).hopeless(fault)


def _unsure(fault: BaseFault, kind: Subjects, times: int | None, *, alone: bool) -> str:
    """Return why the result of this fault is unknown, or an empty text."""
    if times is None:
        return f"{name_of(fault)} comes again for as long as the job runs"
    return row_of(fault).unsure(fault, kind, alone)


def _alike(strikes: list[_Struck], layout: JobLayout) -> str:
    """Return why several strikes may look like an error of the script, or an empty text.

    The same error on two ranks in one step is taken for the script's own error, which stops the job.
    """
    crashes: Counter[str] = Counter()
    for fault, target, _, times in strikes:
        crash = row_of(fault).looks_like(fault)
        if kind_of(target) is Subjects.RANK and crash not in ("", "KILL", "TERM"):
            crashes[crash] += _count(target, layout) * (times or 1)
    return next(
        (f"{crash} of two ranks in one step would be the script's" for crash, n in crashes.items() if n > 1), ""
    )


def _toll(fault: BaseFault, target: Target, layout: JobLayout) -> _Toll:
    """Return the most that one strike of ``fault`` at ``target`` can take."""
    kind = kind_of(target)
    if kind in (Subjects.COORDINATOR, Subjects.STORAGE):
        return _Toll()
    on_trays = kind in (Subjects.AGENT, Subjects.TRAY, Subjects.RACK)
    count = _count(target, layout)
    match row_of(fault).cost(fault, kind):
        case StrikeCost.NOTHING:
            return _Toll()
        case StrikeCost.SLOTS:
            return _Toll(slots=count, surely=False)
        case StrikeCost.SUBJECTS | StrikeCost.SUBJECTS_AT_ONCE as cost:
            surely = cost is StrikeCost.SUBJECTS_AT_ONCE
            if not on_trays:
                return _Toll(workers=count, surely=surely)
            return _Toll(trays=layout.trays if kind is Subjects.RACK else count, surely=surely)
        case other:
            assert_never(other)


def _count(target: Target, layout: JobLayout) -> int:
    """Return how many subjects ``target`` has in a job of this layout."""
    match target:
        case Exactly(names=names):
            return len(names)
        case Several(count=count):
            return count
        case One() | Last():
            return 1
        case NeighbourOf(whom=whom) | BuddyOf(whom=whom):
            return _count(whom, layout)
        case Minority(of=kind):
            return max((_there(kind, layout) - 1) // 2, 0)
        case Majority(of=kind):
            return _there(kind, layout) // 2 + 1
        case _:
            assert_never(target)


def _there(kind: Subjects, layout: JobLayout) -> int:
    counts = {Subjects.RANK: layout.ranks, Subjects.SPARE: layout.spares, Subjects.RACK: 1}
    return counts.get(kind, layout.trays)


# -- what that comes to
def _takes_all(toll: _Toll, layout: JobLayout) -> bool:
    return toll.trays >= layout.trays or toll.workers >= layout.ranks


def _all_lost(toll: _Toll, when: Trigger | None, layout: JobLayout, *, alone: bool) -> Survivability:
    """Judge a single strike that may take all ranks. Snapshots outlive a worker whose agent lives on."""
    what = "every tray is lost" if toll.trays else "every rank is lost"
    if not toll.surely or not alone or (not toll.trays and (layout.sharded is not False or layout.ranks < 2)):
        return Survivability(Label.UNCLEAR, f"{what}, perhaps")
    step = when.step if isinstance(when, AtStep) else None
    begun = step is not None and step >= BEGUN_STEPS
    may_begin_again = layout.starts_over and layout.max_restarts > 0
    if begun and not layout.starts_over:
        return Survivability(Label.BEYOND, f"{what} after step {step}, with the last copy of the state")
    if may_begin_again and layout.checkpoints:
        return Survivability(Label.SURVIVABLE, f"{what}, and a checkpoint is on disk")
    if toll.trays and not layout.max_restarts:
        return Survivability(Label.BEYOND, f"{what}, and no agent is started again (--max-restarts 0)")
    return Survivability(Label.UNCLEAR, f"{what}; it depends on when")


def _trays_lost(trays: int, workers: int, layout: JobLayout, *, surely: bool) -> Survivability:
    lost = trays * layout.slots
    what = f"{trays} of {layout.trays} trays"
    if not layout.shrinks and not layout.max_restarts and layout.slots > layout.spares and surely:
        why = (
            f"{what} are lost, {layout.slots} slots in each, with {layout.spares} spares; nothing comes back or shrinks"
        )
        return Survivability(Label.BEYOND, why)
    if lost + workers > layout.spares:
        return Survivability(Label.UNCLEAR, f"{what} may be lost, and {layout.spares} spares do not replace them")
    if layout.sharded is not False and (layout.copies == "local" or trays > 1):
        return Survivability(Label.UNCLEAR, f"{what} may be lost, and with them the last copy of some shard")
    if layout.ranks <= lost + workers:
        return Survivability(Label.UNCLEAR, f"{what} may be lost, and with them every rank")
    return Survivability(Label.SURVIVABLE, f"{what} may be lost, and {layout.spares} spares can replace them")


def _workers_lost(workers: int, slots: int, layout: JobLayout) -> Survivability:
    if not workers and not slots:
        return Survivability(Label.SURVIVABLE, "nobody is lost")
    what = f"{workers + slots} workers at the most are lost"
    if workers + slots > _LOSSES_MAX:
        return Survivability(Label.UNCLEAR, f"{what}, perhaps without a step between")
    if slots + workers // _STRIKES_A_SLOT > layout.spares:
        return Survivability(Label.UNCLEAR, f"{what}; a slot that stays out has no spare")
    if layout.sharded is not True and workers + slots >= layout.ranks:
        return Survivability(Label.UNCLEAR, f"{what}, of {layout.ranks} ranks: perhaps all replicas at once")
    return Survivability(Label.SURVIVABLE, f"{what}, and others take their places")
