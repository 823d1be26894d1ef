"""Draw a job and a plan from a seed, for campaigns of real runs.

Only faults that this machine can inject are drawn, and only plans whose end is known in advance. A fault that gets an
injector is drawn from then on: `VARIANTS` lists all faults, and the doctor says which of them can be had here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rackrun.chaos.base.job_layout import JobLayout
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.fault_row import Need
from rackrun.chaos.faults.fault_types import Family, Subjects, name_of
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import FAULTS, PLAIN_LOSS, Fault, all_faults, needs_of, one_of
from rackrun.chaos.faults.targets import A_RANK, Last, NeighbourOf, One, Several, Target
from rackrun.chaos.plan.definition import (
    AtPoint,
    AtStep,
    Inject,
    Now,
    Par,
    Part,
    Plan,
    Seq,
    faults_of,
    kind_of,
    parts_of,
)
from rackrun.chaos.plan.survivability import BEGUN_STEPS, Label, judge_plan
from rackrun.chaos.runs.run_plan import check_run
from rackrun.errors import UsageError

__all__ = ["FLAGS", "STEPS", "VARIANTS", "DrawnRun", "draw_flags", "draw_run"]

STEPS = 40
"""The number of steps that a script should do, each of some tens of milliseconds: faults strike after steps 2 to 14."""
_LAST_STEP = 12
_BEYOND = 0.25
_TRIES, _TRIES_EACH = 200, 60
RANK, SPARE, AGENT, TRAY, RACK = Subjects.RANK, Subjects.SPARE, Subjects.AGENT, Subjects.TRAY, Subjects.RACK
STORAGE = Subjects.STORAGE

SHAPES = ((1, 3, 1), (1, 4, 1), (1, 4, 2), (1, 5, 2), (2, 2, 2), (3, 1, 1), (3, 2, 2), (4, 1, 2), (2, 2, 0))
"""Trays, slots of each tray, spares."""
_ON_A_RACK = ((5, 1, 1), (5, 1, 2))
"""The same, for jobs whose GPUs fail."""
_RACK_FILE = """format: 1
name: {trays} trays of {slots}
racks:
  - serial: campaign
    trays: {{count: {trays}, gpus: {slots}}}
"""


class DrawnRun(NamedTuple):
    """A drawn job, its plan, and the end that is known for it."""

    layout: JobLayout
    wrap: str
    """``ddp`` or ``fsdp``."""
    reduction: str
    """``fast`` or ``exact``."""
    plan: Plan
    label: Label
    because: str
    faults: tuple[str, ...]
    """The names of the plan's faults, in order."""
    flags: str = ""
    """What the script has besides, separated by commas (`FLAGS`)."""


FLAGS = ("average", "random", "workers", "batchnorm", "early_scheduler", "two_optimizers", "skip")
"""Features of real scripts that a campaign's script can be told to have by ``{flags}``: see
``examples/chaos/small.py``."""
_FLAGS_MAX = 3


def draw_flags(seed: int, allowed: Sequence[str] = FLAGS, *, reduction: str = "fast") -> str:
    """Draw up to three features of the script.

    They have a random stream of their own, so that the rest of a seed's run does not change. A world that may go on
    with fewer ranks (``exact``) has no statistics per rank (``batchnorm``), because those of a rank that left are lost.
    """
    draw = stream(seed, "script flags")
    usual = [flag for flag in allowed if flag != "batchnorm" or reduction == "fast"]
    return ",".join(sorted(draw.sample(usual, min(draw.randint(0, _FLAGS_MAX), len(usual)))))


VARIANTS: dict[str, Callable[[random.Random], tuple[Fault, Target]]] = {
    name_of(kind): row.draw for kind, row in FAULTS.items()
}
"""Name of a fault -> a function that draws one variant of it, with its target."""
_OF_FAMILY = {
    family.value: [name for kind in all_faults() if kind.family is family and (name := name_of(kind)) != "return"]
    for family in Family
}
_RECOVERY = "in a recovery"
_KINDS = [*_OF_FAMILY, _RECOVERY]
_SPARES_OF_SHARDS = 2


def draw_run(
    seed: int, *, racks: Path | None = None, allowed: Callable[[Plan, JobLayout], bool] | None = None
) -> DrawnRun:
    """Draw the run of a seed.

    ``racks``: the folder for rack files; without it no GPU fails. ``allowed``: whether a plan can be carried out in a
    job here; by default, whether `check_run` accepts it. Another machine, or an additional fault, may lead to other
    runs.
    """
    draw = stream(seed, "campaign")
    allowed = allowed or _here
    beyond = draw.random() < _BEYOND
    for _ in range(_TRIES):
        wanted = draw.sample(_KINDS, draw.choice([1, 2, 2, 3]))
        for _ in range(_TRIES_EACH):
            drawn = _beyond(seed, draw) if beyond else _within(seed, draw, wanted, racks)
            if drawn is not None and allowed(drawn.plan, drawn.layout):
                return drawn
    raise AssertionError("kills are allowed everywhere, and are drawn often")


def _here(plan: Plan, layout: JobLayout) -> bool:
    try:
        check_run(plan, [*layout.options(), "train.py"])
    except UsageError:
        return False
    return True


def _within(seed: int, draw: random.Random, wanted: Sequence[str], racks: Path | None) -> DrawnRun | None:
    """Draw a survivable plan with one fault of each family in ``wanted``; None if the draw is not survivable."""
    parts: list[Part] = []
    for family in wanted:
        if family == _RECOVERY:
            parts.append(_in_a_recovery(draw))
            continue
        fault, target = VARIANTS[draw.choice(_OF_FAMILY[family])](draw)
        when = AtStep(step=draw.randint(2, _LAST_STEP), plus_s=round(0.1 * draw.random(), 3))
        parts.append(Inject(fault=fault, target=target, when=when))
    if any(_takes_trays(part) for part in parts) and draw.random() < 0.5:
        fault, target = one_of(Profile.TRAY_RETURNS, draw)
        parts.append(Inject(fault=fault, target=target, when=AtStep(step=_LAST_STEP + 2)))
    strikes = [part for part in parts if isinstance(part, Inject)]
    needs = needs_of(part.fault for part in strikes)
    needs_rack, needs_shards = Need.DRIVER in needs, Need.SNAPSHOTS in needs
    needs_disk = any(kind_of(part.target) is STORAGE for part in strikes)
    if needs_rack and racks is None:
        return None
    trays, slots, spares = draw.choice(_ON_A_RACK if needs_rack else SHAPES)
    checkpoints = needs_disk or draw.random() < 0.3
    wrap, reduction = draw.choice(["ddp", "ddp", "fsdp"]), draw.choice(["fast", "exact"])
    wrap = "fsdp" if needs_shards else wrap
    if wrap == "fsdp" and spares < _SPARES_OF_SHARDS:
        reduction = "fast"  # "exact" goes on with fewer ranks, whose shards cannot be compared at the end
    layout = JobLayout(
        trays=trays,
        slots=slots,
        spares=spares,
        sharded=wrap == "fsdp",
        checkpoints=checkpoints,
        starts_over=checkpoints,
        rack=_rack_file(racks, trays, slots) if needs_rack and racks is not None else "",
    )
    plan = Plan(plan=Par(parts=tuple(parts)), seed=seed)
    return _told(layout, wrap, reduction, plan, Label.SURVIVABLE)


def _takes_trays(part: Part) -> bool:
    """Return whether trays leave the job, which starts no agents for them."""
    if not isinstance(part, Inject) or kind_of(part.target) is not TRAY:
        return False
    return part.fault.family is Family.HARDWARE and part.fault.loses


def _rack_file(racks: Path, trays: int, slots: int) -> str:
    path = racks / f"{trays}x{slots}.yaml"
    if not path.exists():
        racks.mkdir(parents=True, exist_ok=True)
        path.write_text(_RACK_FILE.format(trays=trays, slots=slots))
    return str(path.resolve())


def _in_a_recovery(draw: random.Random) -> Part:
    """Draw two faults: a rank is lost, and a second fault strikes while the others recover."""
    first = Inject(
        fault=PLAIN_LOSS,
        target=A_RANK,
        when=AtStep(step=draw.randint(3, _LAST_STEP), plus_s=round(0.05 * draw.random(), 3)),
    )
    if draw.random() < 0.4:
        fault, target = one_of(Profile.ARMED, draw)
        armed = Inject(fault=fault, target=target, when=AtStep(step=1))
        if kind_of(target) is RANK:  # another rank is killed than the armed one
            first = msgspec.structs.replace(first, target=NeighbourOf(Last(RANK)))
        return Par(parts=(armed, first))
    second, _ = one_of(Profile.STOPPED_IN_RECOVERY if draw.random() < 0.25 else Profile.LOST_IN_RECOVERY, draw)
    whom = One(draw.choice([RANK, RANK, SPARE]))
    if draw.random() < 0.5:
        when = AtPoint(point=draw.choice(["break.before", "break.after"]))
        return Par(parts=(first, Inject(fault=second, target=whom, when=when)))
    return Seq(parts=(first, Inject(fault=second, target=whom, when=Now(plus_s=round(0.3 * draw.random(), 3)))))


def _beyond(seed: int, draw: random.Random) -> DrawnRun | None:
    """Draw a plan that the job cannot survive; None if the draw is not certain to stop it."""
    step = draw.randint(BEGUN_STEPS, _LAST_STEP + 2)
    when = AtStep(step=step, plus_s=round(0.05 * draw.random(), 3))
    wrap, reduction = draw.choice(["ddp", "fsdp"]), draw.choice(["fast", "exact"])
    trays, slots, spares = draw.choice(SHAPES)
    layout = JobLayout(trays=trays, slots=slots, spares=spares, sharded=wrap == "fsdp")
    how = draw.choice(["coordinator", "ranks", "rack", "tray", "sample"])
    fault: Fault = PLAIN_LOSS
    target: Target
    match how:
        case "coordinator":
            crash = one_of(Profile.COORDINATOR_CRASHES, draw)
            fault, target = crash if draw.random() < 0.3 else one_of(Profile.COORDINATOR_KILLED, draw)
            when = AtStep(step=draw.randint(0, _LAST_STEP), plus_s=when.plus_s)
        case "ranks":
            target = Several(RANK, layout.ranks)
        case "rack":
            target = One(RACK)
        case "tray":
            target = One(draw.choice([TRAY, AGENT]))
            layout = msgspec.structs.replace(layout, max_restarts=0, shrinks=False)
        case _:
            fault, target = one_of(Profile.SCRIPT_BUG, draw)
    plan = Plan(plan=Inject(fault=fault, target=target, when=when), seed=seed, expect="stops")
    return _told(layout, wrap, reduction, plan, Label.BEYOND)


def _told(layout: JobLayout, wrap: str, reduction: str, plan: Plan, wanted: Label) -> DrawnRun | None:
    """Return the drawn run; None if it has another label than wanted, or a fault would have no subject."""
    kinds = [
        part.target.of for part in parts_of(plan.plan) if isinstance(part, Inject) and isinstance(part.target, One)
    ]
    if SPARE in kinds and not layout.spares:
        return None
    if layout.sharded is not True and Need.SNAPSHOTS in needs_of(faults_of(plan)):
        return None  # replicas need no snapshot
    label, because = judge_plan(plan, layout)
    if label is not wanted:
        return None
    faults = tuple(name_of(part.fault) for part in parts_of(plan.plan) if isinstance(part, Inject))
    return DrawnRun(layout, wrap, reduction, plan, label, because, faults)
