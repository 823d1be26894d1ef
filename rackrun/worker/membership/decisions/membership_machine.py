"""Pure machine of one worker's membership: whether its generation is whole, and whether a unit counts.

It is given facts: a gate is entered, its sums are here, a collective has failed, a generation is announced, a plan has
come. It has no threads, no clock and no I/O. `rackrun.worker.membership.worker_membership` calls it under one lock, from
the main thread and from the control thread, so that facts come one after another.

- A generation that is broken stays broken until a newer one is joined.
- What a worker reports when a generation is announced (``passed``, ``entered``, ``gate``) is final: after that only the
  plan decides about a unit whose gate was entered. Sums that come later are ignored.
- A plan says the last committed unit. The unit counts if its gate was entered and the plan has it, else it is open
  again.
"""

from __future__ import annotations

from collections import deque

from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Generation, Position, after_step
from rackrun.worker.membership.decisions.gate_sums import GateSums
from rackrun.worker.membership.decisions.membership_states import (
    INTACT,
    MEMBERSHIP_TRANSITIONS,
    UNIT_TRANSITIONS,
    MembershipState,
    MembershipTrigger,
    UnitState,
    UnitTrigger,
)

__all__ = ["MembershipMachine"]

_SEVERED_S = 0.2
"""Seconds after which a failed collective is reported. It fails when a peer is lost, and BreakGeneration normally
follows within milliseconds; if it does not, nobody else knows."""
_STORY_MAX = 8
"""Number of latest transitions that an `InvalidTransition` names."""


class MembershipMachine:
    """Decides for one worker. The attributes are for reading; the methods change them.

    A read without the lock may be outdated by the time it is used, which is harmless where it only saves work.
    """

    __slots__ = (
        "_failure",
        "_pause_in",
        "_story",
        "announced",
        "broken",
        "entered",
        "gate",
        "generation",
        "passed",
        "plan",
        "state",
        "unit",
        "unit_passed",
    )

    def __init__(self) -> None:
        self.generation = 0
        """The generation that this worker's communicators belong to; 0 before the first."""
        self.broken = False
        """Whether something of the generation is broken, so that no gate can pass until the next is joined."""
        self.announced = 0
        """The newest generation that was announced, by a break or by its plan."""
        self.plan: GenerationPlan | None = None
        """The newest plan."""
        self.passed = BEGIN
        """The last unit that is known on this rank to be committed."""
        self.entered = BEGIN
        """The last unit whose gate was entered; ``passed`` if that unit does not count."""
        self.gate: GateSums | None = None
        """The sums of the gate of ``passed``; None before the first gate, and after a rollback."""
        self.unit_passed = False
        """Whether the main thread knows that its current unit counts, so that what the unit does from here on cannot be
        undone."""
        self._failure: tuple[float, str] | None = None
        """When a collective of this generation failed on its own, in seconds, and the error; None once it is
        reported."""
        self._pause_in = 0
        """The generation that was asked to pause; 0: none."""
        self.state, self.unit = MembershipState.WAITING, UnitState.OPEN
        self._story: deque[str] = deque(maxlen=_STORY_MAX)

    # -- a unit, on the main thread
    def begin_unit(self) -> None:
        """Begin an attempt at a unit: it does not count yet."""
        self.unit_passed = False

    def enter_gate(self, at: Position) -> bool:
        """Enter the gate of the unit at ``at``. Returns False, with nothing changed, if no gate can pass here: the
        attempt does not count."""
        if self.broken or not self.generation:
            return False
        self._move_unit(UnitTrigger.ENTER)
        self.entered = at
        return True

    def pass_gate(self, sums: GateSums) -> None:
        """Conclude from ``sums``, which hold what every rank has offered, that the unit whose gate was entered counts.

        Must not be called for a broken generation: the report that was sent says that this rank saw no sums. Raises
        `InvalidTransition` if a plan has discarded the unit.
        """
        assert not self.broken, "the sums of a broken generation count for nothing"
        self._move_unit(UnitTrigger.PASS)
        self.passed, self.gate, self.unit_passed = self.entered, sums, True

    def refuse_gate(self) -> None:
        """Conclude from the sums, as all ranks do, that the unit is to be done again."""
        self._move_unit(UnitTrigger.REFUSE)
        self.entered = self.passed

    def count_by_plan(self, at: Position) -> bool:
        """Return whether the unit at ``at``, whose gate broke, counts, now that the plan is here."""
        if self.passed < at:
            return False
        self.unit_passed = True
        return True

    # -- a generation ends
    def fail_collective(self, generation: int, because: str, now_s: float) -> bool:
        """Take in that a collective of ``generation`` has failed at ``now_s``, in seconds of any monotonic clock:
        nothing of that generation counts any more. Returns False, with nothing changed, if it is not this worker's
        generation, or if this worker is in none (0)."""
        if generation != self.generation or not self.generation:
            return False
        broken = self.broken
        self._move(MembershipTrigger.FAIL)
        if not broken:
            self._failure = now_s, because
        return True

    def announce_break(self, generation: Generation) -> bool:
        """Take in that ``generation`` is announced. Returns False, with nothing changed, if it is not newer than what is
        known. If it is, `passed`, `entered` and `gate` are what this worker reports, and stay so until the plan."""
        if generation <= self.announced:
            return False
        self._move(MembershipTrigger.BREAK)
        self.announced = generation
        return True

    def take_unreported_failure(self, now_s: float) -> str | None:
        """Return the error of a failed collective if it is to be reported at ``now_s``, once: nobody has announced a
        newer generation for a while. None otherwise."""
        if self._failure is None or now_s - self._failure[0] < _SEVERED_S:
            return None
        because, self._failure = self._failure[1], None
        return None if self.announced > self.generation else because

    # -- a generation begins
    def take_plan(self, plan: GenerationPlan) -> bool:
        """Take in a plan, which decides about a unit whose gate was entered. Returns False, with nothing changed, if the
        plan is outdated."""
        if plan.generation < self.announced or (self.plan and plan.generation <= self.plan.generation):
            return False
        self._move(MembershipTrigger.PLAN)
        self.announced, self.plan = plan.generation, plan
        if self.entered > self.passed:
            if plan.committed >= self.entered:
                self._move_unit(UnitTrigger.COUNT)
                self.passed, self.gate = self.entered, GateSums.of(plan.gate) if plan.gate else None
            else:
                self._move_unit(UnitTrigger.DISCARD)
                self.entered = self.passed
        return True

    def join(self, plan: GenerationPlan) -> None:
        """Be in the generation of ``plan``. The caller has checked that it is not superseded. Raises `InvalidTransition`
        if no plan has come."""
        self._move(MembershipTrigger.JOIN, plan.generation)
        self._failure = None

    def start_alone(self, generation: Generation) -> None:
        """Be in ``generation``, which no coordinator has made and no other follows. Raises `InvalidTransition` after a
        break or a plan."""
        self._move(MembershipTrigger.START, generation)

    def leave_main(self, plan: GenerationPlan) -> None:
        """Leave ``main`` to enter it again for ``plan``. The caller has checked that it is not superseded.

        The committed position stays if the plan cuts all shards anew. If it does not, this worker is a newcomer, and
        begins as a spare does.
        """
        if plan.reshard is None:
            self._move(MembershipTrigger.LEAVE, Generation(0))
            self.place(BEGIN, ())
        else:
            self._move(MembershipTrigger.REENTER)
            self.place(plan.committed, plan.gate)
        self.unit_passed = False

    def place(self, position: Position, gate: tuple[float, ...]) -> None:
        """Set the committed position and the sums of its gate, () for none: for a newcomer, and after a rollback."""
        self._move_unit(UnitTrigger.PLACE)
        self.passed = self.entered = position
        self.gate = GateSums.of(gate) if gate else None

    def ask_pause(self, generation: Generation) -> None:
        """Take in that ``generation`` is to pause. Ignored between two generations and on a spare."""
        if self.is_whole(generation):
            self._pause_in = generation

    # -- what is known
    def is_whole(self, generation: int) -> bool:
        """Return whether ``generation`` is this worker's and is not broken. What the coordinator asks of any other
        generation is outdated."""
        # in this order: without the lock, a join between the two reads must not make an old generation look whole
        return not self.broken and generation == self.generation

    def is_superseded(self, generation: int) -> bool:
        """Return whether a generation other than ``generation`` was announced last."""
        return self.announced != generation

    @property
    def pausing(self) -> bool:
        """Whether this worker was asked to pause in its present generation."""
        return self._pause_in == self.generation != 0

    @property
    def has_next_plan(self) -> bool:
        """Whether the plan of the newest generation is here, and that generation is not joined yet."""
        return (
            self.plan is not None and self.plan.generation == self.announced and self.plan.generation > self.generation
        )

    def _move(self, trigger: MembershipTrigger, generation: Generation | None = None) -> None:
        """Make one transition of the worker, to ``generation`` if that changes. Raises `InvalidTransition`, and changes
        nothing, if there is none."""
        state = MEMBERSHIP_TRANSITIONS[self.state].get(trigger)
        if state is None:
            raise InvalidTransition(f"the worker in generation {self.generation}", self.state, trigger, self._story)
        if generation is not None:
            self.generation = generation  # first, because a reader without the lock must not see the old one as whole
        self.state, self.broken = state, state not in INTACT
        self._story.append(trigger)

    def _move_unit(self, trigger: UnitTrigger) -> None:
        """Make one transition of the unit. Raises `InvalidTransition`, and changes nothing, if there is none."""
        state = UNIT_TRANSITIONS[self.unit].get(trigger)
        if state is None:
            who = f"the unit {after_step(self.passed.step)}, phase {self.passed.phase},"
            raise InvalidTransition(who, self.unit, trigger, self._story)
        self.unit = state
