"""Carry out a chaos plan as a pure state machine, for real runs and for simulated ones.

The conductor is given what can be seen of the job (`Observation`) and the outcome of each of its orders; it returns new orders.
Everything random comes from streams of the plan's seed, each named by the part of the plan that draws from it, so the
same observations give the same orders.

Every order is recorded together with what it struck. `Conductor.resolved` returns this record as a plan, which repeats
the run as exactly as steps and times allow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from rackrun.chaos.base.errors import NoTarget
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly, Scene, SlotOccupant, Subject, Target, resolve
from rackrun.chaos.plan.definition import (
    AtPoint,
    AtStep,
    AtTime,
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
    Trigger,
    is_endless,
)
from rackrun.protocol.ids import after_step

__all__ = ["TARGET_PATIENCE_S", "Conductor", "Order", "StrikeRecord", "Observation", "StrikeOrder", "TakeBack"]

TARGET_PATIENCE_S = 10.0
"""How many seconds a strike waits for a subject, such as a spare that still starts or a rank that is being replaced."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation of the job."""

    now_s: float
    step: int
    """The newest committed step; -1 if there is none."""
    scene: Scene
    points: dict[str, int] = field(default_factory=dict)
    """How many times each named point has been reached."""


@dataclass(frozen=True, slots=True)
class StrikeOrder:
    """An order: strike these subjects with this fault."""

    number: int
    fault: Fault
    subjects: tuple[Subject, ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """An order: take a fault back."""

    number: int
    """The number of the strike to take back."""


Order = StrikeOrder | TakeBack


@dataclass(slots=True)
class StrikeRecord:
    """The record of one strike."""

    strike: StrikeOrder
    step: int
    plus_s: float
    """Seconds since the commit of that step was seen."""
    at_s: float
    took: bool | None = None
    """Whether the strike took effect; None while that is not known."""
    detail: str = ""
    back_s: float | None = None
    """When the fault was taken back, on the clock of `Observation.now_s`; None if it was not."""


@dataclass(slots=True)
class _Wait:
    """What a script waits for: a condition, and the time at which to check it again if nothing happens before."""

    until: Callable[[], bool]
    wake_s: float | None = None


_Script = Iterator[_Wait]


class Conductor:
    """The state machine that carries out one plan."""

    def __init__(self, plan: Plan, *, last_step: int | None = None) -> None:
        """``last_step`` is the job's last step, where it is known; no `Quiet` waits beyond it."""
        self.plan = plan
        self._last_step = math.inf if last_step is None else last_step
        self.records: list[StrikeRecord] = []
        self.nobody: list[str] = []
        """Strikes that found no subject, each as a text."""
        self._orders: list[Order] = []
        self._tasks: list[tuple[_Script, _Wait]] = []
        self._seen: Observation | None = None
        self._started_s: float | None = None
        self._step_s = 0.0
        self._whole = Scene(())
        self._struck: list[Subject] = []
        self._reached: set[str] = set()
        """Names of the parts that have struck or found no subject."""
        self._dying: dict[str, int] = {}
        """Slot -> the incarnation that was struck there, until that worker is seen to be gone."""
        self._start(self._perform(plan.plan, ""))

    # -- input
    def see(self, seen: Observation) -> list[Order]:
        """Take in an observation, and return the orders that follow from it, in order."""
        if self._seen is None or seen.step > self._seen.step:
            self._step_s = seen.now_s
        if self._started_s is None and seen.step >= 0:
            self._started_s = seen.now_s
        self._seen = seen
        if len(seen.scene.places) > len(self._whole.places):
            self._whole = seen.scene
        live = {place.slot: place.incarnation for place in seen.scene.places}
        self._dying = {slot: of for slot, of in self._dying.items() if live.get(slot) == of}
        return self._advance()

    def confirm(self, number: int, *, took: bool, detail: str = "") -> list[Order]:
        """Take in the outcome of strike ``number``, and return the orders that follow. ``took``: the strike has taken
        effect."""
        record = self.records[number]
        record.took, record.detail = took, detail
        if not took:
            for place in self._places(record.strike.subjects):
                self._dying.pop(place.slot, None)
        return self._advance() if self._seen is not None else []

    @property
    def done(self) -> bool:
        """Whether the plan has been carried out completely."""
        return not self._tasks

    @property
    def owes(self) -> bool:
        """Whether the plan still has to strike.

        An endless plan still has to strike as long as some part of it has not had its turn even once.
        """
        waits = not (is_endless(self.plan) and self._reached.issuperset(_strikes_of(self.plan.plan, "")))
        return waits and not self.done

    @property
    def wake_s(self) -> float | None:
        """The time at which the conductor needs its next observation if nothing happens before; None if there is no
        such time.

        Moments that have passed already are ignored: what was due then follows with the next observation.
        """
        now_s = -math.inf if self._seen is None else self._seen.now_s
        moments = [wait.wake_s for _, wait in self._tasks if wait.wake_s is not None and wait.wake_s > now_s]
        return min(moments, default=None)

    def resolved(self) -> Plan:
        """Return the plan of what was done: every strike, with its subjects by name and at the same step. Strikes that
        are known not to have taken effect are left out."""
        parts: list[Part] = []
        for record in self.records:
            if record.took is False:
                continue
            fault = record.strike.fault
            if fault.lasts and record.back_s is not None:
                fault = msgspec.structs.replace(fault, for_s=round(record.back_s - record.at_s, 3))
            kinds = dict.fromkeys(subject.kind for subject in record.strike.subjects)
            for kind in kinds:
                names = tuple(subject.name for subject in record.strike.subjects if subject.kind == kind)
                when = AtStep(step=record.step, plus_s=round(record.plus_s, 3))
                parts.append(Inject(when=when, fault=fault, target=Exactly(kind, names)))
        return msgspec.structs.replace(self.plan, plan=Par(parts=tuple(parts)) if parts else Heal())

    # -- carrying it out
    def _start(self, script: _Script) -> Callable[[], bool]:
        """Run ``script`` beside the others, and return a function that says whether it has ended."""
        running = [True]

        def to_its_end() -> _Script:
            yield from script
            running[0] = False

        self._tasks.append((to_its_end(), _Wait(lambda: self._seen is not None)))
        return lambda: not running[0]

    def _advance(self) -> list[Order]:
        """Run every script as far as its conditions allow, and return the orders that this produced."""
        moved = True
        while moved:
            moved = False
            tasks, self._tasks = self._tasks, []
            for script, wait in tasks:
                if not wait.until():
                    self._tasks.append((script, wait))
                    continue
                moved = True
                following = next(script, None)
                if following is not None:
                    self._tasks.append((script, following))
        orders, self._orders = self._orders, []
        return orders

    def _perform(self, part: Part, name: str) -> _Script:
        """Carry out ``part``. ``name`` is the part's place in the plan, which names its random streams."""
        match part:
            case Inject(fault=fault, target=target, when=when):
                yield from self._until(when)
                yield from self._strike(fault, target, name)
            case Seq(parts=parts):
                for index, inner in enumerate(parts):
                    yield from self._perform(inner, f"{name}.{index}")
            case Par(parts=parts):
                ended = [self._start(self._perform(inner, f"{name}.{index}")) for index, inner in enumerate(parts)]
                yield _Wait(lambda: all(end() for end in ended))
            case Every(mean_s=mean_s, part=inner, times=times):
                draw, turn = stream(self.plan.seed, name, "every"), 0
                while times is None or turn < times:
                    yield self._after(draw.expovariate(1 / mean_s))
                    yield from self._perform(inner, f"{name}.{turn}")
                    turn += 1
            case Burst(times=times, within_s=within_s, part=inner):
                draw = stream(self.plan.seed, name, "burst")
                began, ended = self._now(), []
                for turn, moment in enumerate(sorted(draw.uniform(0, within_s) for _ in range(times))):
                    yield self._at(began + moment)
                    ended.append(self._start(self._perform(inner, f"{name}.{turn}")))
                yield _Wait(lambda: all(end() for end in ended))
            case FlipFlop():
                yield from self._flip_flop(part, name)
            case Swizzle():
                yield from self._swizzle(part, name)
            case Heal():
                for record in self.records:
                    self._take_back(record)
            case Quiet(steps=steps):
                goal = min(self._sight().step + steps, self._last_step)
                yield _Wait(lambda: self._sight().step >= goal)
            case _:
                assert_never(part)

    def _flip_flop(self, part: FlipFlop, name: str) -> _Script:
        fault = _until_taken_back(part.fault)
        for turn in range(part.times):
            record = yield from self._strike(fault, part.target, f"{name}.{turn}")
            yield self._after(part.on_s)
            if record is not None:
                self._take_back(record)
            yield self._after(part.off_s)

    def _swizzle(self, part: Swizzle, name: str) -> _Script:
        draw = stream(self.plan.seed, name, "swizzle")
        subjects = self._resolve(part.target, draw) or ()
        self._reached.add(name)
        struck: list[StrikeRecord] = []
        fault = _until_taken_back(part.fault)
        began = self._now()
        for moment, subject in zip(
            _moments(part.over_s, len(subjects), draw), draw.sample(subjects, len(subjects)), strict=True
        ):
            yield self._at(began + moment)
            yield _Wait(lambda whom=(subject,): self._within_budget(fault, whom))  # type: ignore[misc]
            struck.append(self._order(fault, (subject,)))
            yield _Wait(lambda record=struck[-1]: record.took is not None)  # type: ignore[misc]
        began = self._now()
        for moment, record in zip(
            _moments(part.over_s, len(struck), draw), draw.sample(struck, len(struck)), strict=True
        ):
            yield self._at(began + moment)
            self._take_back(record)

    def _strike(self, fault: Fault, target: Target, name: str) -> Generator[_Wait, None, StrikeRecord | None]:
        """Strike, and return the record; None if there was no subject."""
        draw = stream(self.plan.seed, name, "target")
        subjects: tuple[Subject, ...] = ()
        patient_until_s = self._now() + TARGET_PATIENCE_S

        def affordable() -> bool:
            nonlocal subjects
            state = draw.getstate()
            found = self._resolve(target, draw, last=self._now() >= patient_until_s)
            if found is not None and (not found or self._within_budget(fault, found)):
                subjects = found
                return True
            draw.setstate(state)
            return False

        yield _Wait(affordable, patient_until_s)
        self._reached.add(name)
        if not subjects:
            return None
        record = self._order(fault, subjects)
        yield _Wait(lambda: record.took is not None)
        for_s = getattr(fault, "for_s", None)
        if fault.lasts and for_s is not None and record.took:
            yield self._at(record.at_s + for_s)
            self._take_back(record)
        return record

    def _resolve(self, target: Target, draw: random.Random, *, last: bool = True) -> tuple[Subject, ...] | None:
        """Return the subjects of ``target``, or None if there are none yet.

        If ``last`` is true and there are none, this is noted in `nobody` and the result is empty.
        """
        seen = self._sight()
        scene = Scene(seen.scene.places, seen.scene.buddies, tuple(self._struck))
        try:
            return resolve(target, scene, draw)
        except NoTarget as error:
            if not last:
                return None
            self.nobody.append(f"{after_step(seen.step)}: {error}")
            return ()

    def _within_budget(self, fault: Fault, subjects: tuple[Subject, ...]) -> bool:
        """Whether this strike, with all that is lost or disturbed already, stays within the plan's budget."""
        budget, seen = self.plan.budget, self._sight()
        if not (fault.loses or fault.lasts):
            return True
        live = {place.slot for place in seen.scene.places}
        gone = {place.slot for place in self._whole.places} - live
        gone |= self._dying.keys()
        gone |= {place.slot for record in self._in_force() for place in self._places(record.strike.subjects)}
        gone |= {place.slot for place in self._places(subjects)}
        slots = budget.slots is None or len(gone) <= budget.slots
        whole = {place.tray for place in self._whole.places}
        left = {place.tray for place in self._whole.places if place.slot not in gone}
        return slots and (budget.trays is None or len(whole - left) <= budget.trays)

    def _in_force(self) -> list[StrikeRecord]:
        """Return the strikes of lasting faults that have not been taken back."""
        return [r for r in self.records if r.strike.fault.lasts and r.took is not False and r.back_s is None]

    def _places(self, subjects: tuple[Subject, ...]) -> list[SlotOccupant]:
        return [place for subject in subjects for place in self._sight().scene.of(subject)]

    def _order(self, fault: Fault, subjects: tuple[Subject, ...]) -> StrikeRecord:
        seen = self._sight()
        strike = StrikeOrder(len(self.records), fault, subjects)
        record = StrikeRecord(strike, seen.step, seen.now_s - self._step_s, seen.now_s)
        self.records.append(record)
        self._struck += subjects
        if fault.loses:
            self._dying |= {place.slot: place.incarnation for place in self._places(subjects)}
        self._orders.append(strike)
        return record

    def _take_back(self, record: StrikeRecord) -> None:
        if record.strike.fault.lasts and record.took and record.back_s is None:
            record.back_s = self._now()
            self._orders.append(TakeBack(record.strike.number))

    # -- waiting
    def _until(self, when: Trigger) -> _Script:
        match when:
            case Now(plus_s=plus_s):
                if plus_s:
                    yield self._after(plus_s)
            case AtStep(step=step, plus_s=plus_s):
                yield _Wait(lambda: self._sight().step >= step)
                if plus_s:
                    yield self._after(plus_s)
            case AtPoint(point=point, nth=nth):
                yield _Wait(lambda: self._sight().points.get(point, 0) >= nth)
            case AtTime(s=seconds):
                yield _Wait(lambda: self._started_s is not None)
                assert self._started_s is not None
                yield self._at(self._started_s + seconds)
            case _:
                assert_never(when)

    def _after(self, seconds: float) -> _Wait:
        return self._at(self._now() + seconds)

    def _at(self, moment_s: float) -> _Wait:
        return _Wait(lambda: self._now() >= moment_s, moment_s)

    def _now(self) -> float:
        return self._sight().now_s

    def _sight(self) -> Observation:
        assert self._seen is not None, "nothing is carried out before the job is seen"
        return self._seen


def _strikes_of(part: Part, name: str) -> Iterator[str]:
    """Yield the names that `Conductor` gives to the parts of ``part`` that strike."""
    match part:
        case Inject() | Swizzle():
            yield name
        case FlipFlop(times=times):
            yield from (f"{name}.{turn}" for turn in range(times))
        case Seq(parts=parts) | Par(parts=parts):
            for index, inner in enumerate(parts):
                yield from _strikes_of(inner, f"{name}.{index}")
        case Every(part=inner) | Burst(part=inner):
            for turn in range(part.times or 1):
                yield from _strikes_of(inner, f"{name}.{turn}")
        case _:
            pass


def _until_taken_back(fault: Fault) -> Fault:
    """Return the fault without ``for_s``, so that it lasts until it is taken back."""
    return msgspec.structs.replace(fault, for_s=None) if getattr(fault, "for_s", None) is not None else fault


def _moments(within_s: float, count: int, draw: random.Random) -> list[float]:
    """Return ``count`` random moments between 0 and ``within_s`` seconds, in order."""
    return sorted(draw.uniform(0, within_s) for _ in range(count))
