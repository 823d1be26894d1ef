"""Chaos plans as values: what goes wrong, when, and how the job must end. Plans are written as YAML or JSON.

::

    format: 1
    seed: 7
    expect: survives                   # or: stops, where the plan is beyond what the job can survive
    budget: {slots: 2}                 # never more than that lost at once; a strike that would exceed it waits
    plan:
      do: seq
      parts:
        - {do: inject, when: {at: step, step: 20}, fault: {fault: kill}, target: {who: one, of: rank}}
        - do: every
          mean_s: 15
          times: 4
          part: {do: inject, fault: {fault: pause, for_s: 4}, target: {who: one, of: tray}}
        - {do: heal}
        - {do: quiet, steps: 50}

A trigger is only as reproducible as what it counts: points in the code are the most reproducible, then steps, then
time.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, assert_never, get_args

import msgspec
import yaml

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.faults.fault_types import Subjects, name_of
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.table.validate import nonsense_of, not_finite
from rackrun.chaos.faults.targets import BuddyOf, Exactly, Last, Majority, Minority, NeighbourOf, One, Several, Target

__all__ = [
    "AtPoint",
    "AtStep",
    "AtTime",
    "Budget",
    "Burst",
    "Every",
    "FlipFlop",
    "Heal",
    "Inject",
    "Now",
    "Par",
    "Part",
    "Plan",
    "Quiet",
    "Seq",
    "Swizzle",
    "Trigger",
    "faults_of",
    "is_endless",
    "parts_of",
    "read_plan",
    "schema",
    "write_plan",
]

FORMAT = 1


# -- when
class _Trigger(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="at", forbid_unknown_fields=True, omit_defaults=True
):
    pass


class Now(_Trigger, frozen=True, kw_only=True, tag="now"):
    """The strike is due when its part's turn comes, or ``plus_s`` seconds later."""

    plus_s: float = 0.0


class AtStep(_Trigger, frozen=True, kw_only=True, tag="step"):
    """The strike is due ``plus_s`` seconds after ``step``, or a later step, is the newest committed one.

    A ``step`` of -1 is the start of the job.
    """

    step: int
    plus_s: float = 0.0


class AtPoint(_Trigger, frozen=True, kw_only=True, tag="point"):
    """The strike is due when the job's processes have reached a named point ``nth`` times since the start."""

    point: str
    nth: int = 1


class AtTime(_Trigger, frozen=True, kw_only=True, tag="time"):
    """The strike is due ``s`` seconds after the first committed step, in wall-clock time or in virtual time."""

    s: float


Trigger = Now | AtStep | AtPoint | AtTime


# -- what
class _Part(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", forbid_unknown_fields=True, omit_defaults=True):
    pass


class Inject(_Part, frozen=True, kw_only=True, tag="inject"):
    """A step of a plan: ``fault`` hits all subjects of ``target`` at once. The next step begins when the fault has
    taken effect and, with ``for_s``, has been taken back."""

    fault: Fault
    target: Target
    when: Trigger = Now()


class Seq(_Part, frozen=True, kw_only=True, tag="seq"):
    """The parts run one after another: each begins when the turn of the one before is over."""

    parts: tuple[Part, ...]


class Par(_Part, frozen=True, kw_only=True, tag="par"):
    """All parts begin at the same time; the turn is over when the turns of all are."""

    parts: tuple[Part, ...]


class Every(_Part, frozen=True, kw_only=True, tag="every"):
    """The part runs ``times`` times, or until the job ends.

    The waits before each run are exponentially distributed, ``mean_s`` seconds on average.
    """

    mean_s: float
    part: Part
    times: int | None = None


class Burst(_Part, frozen=True, kw_only=True, tag="burst"):
    """The part runs ``times`` times, beginning at random moments within ``within_s`` seconds."""

    times: int
    within_s: float
    part: Part


class FlipFlop(_Part, frozen=True, kw_only=True, tag="flip_flop"):
    """A fault that lasts is in force for ``on_s`` seconds, then absent for ``off_s`` seconds, ``times`` times."""

    fault: Fault
    target: Target
    on_s: float
    off_s: float
    times: int = 1


class Swizzle(_Part, frozen=True, kw_only=True, tag="swizzle"):
    """A fault that lasts strikes its subjects one by one and is then taken back from them in another order.

    Each of the two phases happens at random moments within ``over_s`` seconds.
    """

    fault: Fault
    target: Target
    over_s: float


class Heal(_Part, frozen=True, kw_only=True, tag="heal"):
    """Every fault in force is taken back."""


class Quiet(_Part, frozen=True, kw_only=True, tag="quiet"):
    """Nothing is struck until ``steps`` more steps, or the job's last step, are committed: the job must go on by
    itself."""

    steps: int


Part = Inject | Seq | Par | Every | Burst | FlipFlop | Swizzle | Heal | Quiet


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many slots and trays may be lost at the same time. A strike that would exceed this waits until something is
    back."""

    slots: int | None = None
    trays: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A chaos plan: what goes wrong, and how the job has to end."""

    plan: Part
    seed: int = 0
    expect: Literal["survives", "stops"] = "survives"
    """``survives``: the job must end as the run without faults does, bit for bit. ``stops``: it must stop with a reason
    and a remedy."""
    budget: Budget = Budget()
    name: str = ""
    rollback_max: int | None = None
    """The most committed steps that may be computed again in one rollback to a snapshot.

    None: the limit follows from how often the ranks report that snapshots are taken.
    """
    watch: tuple[str, ...] = ()
    """Points that are counted in addition to those that the plan names."""
    format: int = FORMAT


def parts_of(part: Part) -> Iterator[Part]:
    """Yield ``part`` and all parts within it, in the order of the text."""
    yield part
    match part:
        case Seq(parts=parts) | Par(parts=parts):
            for inner in parts:
                yield from parts_of(inner)
        case Every(part=inner) | Burst(part=inner):
            yield from parts_of(inner)
        case Inject() | FlipFlop() | Swizzle() | Heal() | Quiet():
            pass
        case _:
            assert_never(part)


def faults_of(plan: Plan) -> Iterator[Fault]:
    """Yield the fault of every strike in the plan."""
    for part in parts_of(plan.plan):
        if isinstance(part, Inject | FlipFlop | Swizzle):
            yield part.fault


def is_endless(plan: Plan) -> bool:
    """Whether the plan goes on for as long as the job runs."""
    return any(isinstance(part, Every) and part.times is None for part in parts_of(plan.plan))


_INVALID = re.compile(r"Invalid (?:enum )?value '(.+)' - at `.*\.(\w+)`")


def _remedy_of(error: str) -> str:
    """Return a remedy for a validation error: the words that may stand in that place."""
    if ".names[" in error:
        return "names are text: put numbers in quotes, as in names: ['0']."
    found = _INVALID.search(error)
    tags = {"do": Part, "fault": Fault, "who": Target, "at": Trigger}
    if found is None or found[2] not in (*tags, "of", "kind"):
        return "see docs/chaos.md for what a plan may say."
    kinds = get_args(tags.get(found[2], ()))
    known = [str(kind.__struct_config__.tag) for kind in kinds] if kinds else list(map(str, Subjects))
    near = difflib.get_close_matches(found[1], known, 1)
    return f"did you mean {near[0]}? There are: {', '.join(known)}." if near else f"give one of {', '.join(known)}."


# -- reading and writing
def read_plan(path: Path) -> Plan:
    """Read a plan from a YAML or JSON file. Raises `PlanError`, which names the place of the mistake."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PlanError(f"{path} cannot be read: {why}.", remedy="give a plan; see examples/chaos.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PlanError(
            f"{path}{line}: no YAML: {getattr(error, 'problem', error)}.", remedy="mend it there."
        ) from error
    return plan_from(raw, str(path))


def plan_from(raw: object, where: str = "the plan") -> Plan:
    """Build a plan from plain values (dicts, lists, texts, numbers). Raises `PlanError`."""
    if not isinstance(raw, dict):
        found = "is empty" if raw is None else "is a list" if isinstance(raw, list) else f"is the value {raw!r:.40}"
        raise PlanError(f"{where} {found}, not a mapping.", remedy="see docs/chaos.md for what a plan may say.")
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(f"{where}: {error}.", remedy=_remedy_of(str(error))) from error
    check(plan, where)
    return plan


def write_plan(plan: Plan) -> str:
    """Return the plan as YAML, from which `read_plan` makes an equal plan."""
    return str(yaml.safe_dump(msgspec.to_builtins(plan), sort_keys=False, width=120))


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan."""
    return msgspec.json.schema(Plan)


def check(plan: Plan, where: str = "the plan") -> None:
    """Check that the plan makes sense in any job. Raises `PlanError` if it does not."""

    def refuse(what: str, remedy: str) -> None:
        raise PlanError(f"{where}: {what}.", remedy=remedy)

    if plan.format != FORMAT:
        refuse(f"format {plan.format} is not known", f"this version reads format {FORMAT}")
    for part in parts_of(plan.plan):
        match part:
            case (
                Inject(fault=fault, target=target)
                | FlipFlop(fault=fault, target=target)
                | Swizzle(fault=fault, target=target)
            ):
                kind = kind_of(target)
                if kind not in fault.strikes:
                    refuse(f"{name_of(fault)} cannot strike a {kind}", f"it strikes: {', '.join(fault.strikes)}")
                if found := nonsense_of(fault, target):
                    refuse(f"{name_of(fault)}: {found[0]}", found[1])
                if not isinstance(part, Inject) and not fault.lasts:
                    refuse(f"{name_of(fault)} does not last, so it cannot be taken back", "use inject, every or burst")
            case Quiet(steps=steps) if steps < 1:
                refuse(f"quiet for {steps} steps", "ask for at least one")
            case Seq(parts=()) | Par(parts=()):
                refuse("a part has no parts", "give it at least one")
            case _:
                pass
        for field in ("on_s", "off_s", "over_s", "within_s", "mean_s", "times"):
            value = getattr(part, field, None)
            if value is not None and not 0 < value < math.inf:
                refuse(f"{field} is {value}", "give something above 0")
        if isinstance(part, Inject):
            _check_trigger(part.when, refuse)
        if isinstance(part, Inject | FlipFlop | Swizzle):
            _check_budget(part, plan.budget, refuse)
    limits = [(name, getattr(plan.budget, name)) for name in ("slots", "trays")]
    for name, limit in limits:
        if limit is not None and limit < 0:
            refuse(f"a budget of {limit} {name}", "give 0 or more")


def _check_trigger(when: Trigger, refuse: Any) -> None:
    if found := not_finite(when):
        refuse(*found)
    match when:
        case AtStep(step=step, plus_s=plus) if step < -1 or plus < 0:
            refuse(f"step {step} and {plus} s is before the start", "steps are counted from 0; -1 is the start")
        case AtTime(s=seconds) | Now(plus_s=seconds) if seconds < 0:
            refuse(f"{seconds} s is in the past", "give 0 or more")
        case AtPoint(nth=nth) if nth < 1:
            refuse(f"the {nth}th time of a point", "count from 1")
        case _:
            pass


def _check_budget(part: Inject | FlipFlop | Swizzle, budget: Budget, refuse: Any) -> None:
    """Refuse a strike that alone exceeds the budget: it would wait forever."""
    kind, fault = kind_of(part.target), part.fault
    if kind in (Subjects.COORDINATOR, Subjects.STORAGE, Subjects.RACK) or not (fault.loses or fault.lasts):
        return
    target = part.target
    count = len(target.names) if isinstance(target, Exactly) else target.count if isinstance(target, Several) else 1
    limits = [("slots", budget.slots)]
    limits += [("trays", budget.trays)] if kind in (Subjects.TRAY, Subjects.AGENT) else []
    for name, limit in limits:
        if limit is not None and limit >= 0 and count > limit:
            refuse(
                f"{name_of(fault)} of {count} {kind}(s) never fits into a budget of {limit} {name}",
                "raise it, or strike fewer",
            )


def kind_of(target: Target) -> Subjects:
    """Return the kind of the target's subjects."""
    match target:
        case Exactly(kind=kind):
            return kind
        case One(of=kind) | Several(of=kind) | Minority(of=kind) | Majority(of=kind) | Last(of=kind):
            return kind
        case NeighbourOf(whom=whom) | BuddyOf(whom=whom):
            return kind_of(whom)
        case _:
            assert_never(target)
