"""Simulate a job on a fleet for days in virtual time.

There is one event for a failure, a repair, a start, and the end of a recovery, and none for a step, a heartbeat, a
lease or a snapshot (`rackrun.chaos.planner.model.undisturbed_training` counts those). Decisions are the core's own
(`rackrun.chaos.planner.model.policy_adapter`), and so is the placement of ranks
(`rackrun.chaos.planner.model.fleet_state`). The length of a recovery is not simulated but a cost
(`rackrun.chaos.planner.inputs.operation_costs`). A failure in the middle of a recovery begins it anew, with fresh
facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from rackrun.chaos.planner.inputs.failures import FailureSource, UnitFailure, slots_of
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.inputs.repair_crews import Crews
from rackrun.chaos.planner.model.fleet_state import FleetState, NewSlots, SlotStamps
from rackrun.chaos.planner.model.job_state import Intervals, State
from rackrun.chaos.planner.model.outcome import FleetOutcome, TimeBreakdown
from rackrun.chaos.planner.model.policy_adapter import Policy, PolicyAdapter, Situation
from rackrun.chaos.simulator.base.virtual_time import FIRST, LAST, NS, Engine
from rackrun.protocol.policy_types import Decision, Rules, Rung, Weights

__all__ = ["FleetSimulation"]


class _Phase(Enum):
    TRAINING = "training"
    DETECTING = "detecting"
    RECOVERING = "recovering"
    """A plan is made, and is being carried out."""
    WAITING = "waiting"
    """The job waits for spares, by a decision."""
    STOPPED = "stopped"
    """The job has to be launched again by hand."""


@dataclass(slots=True)
class FleetSimulation:
    """One run. Call `run` once."""

    fleet: Fleet
    job: FleetJob
    costs: PlanCosts
    intervals: Intervals
    source: FailureSource
    horizon_s: float
    rules: Rules = field(default_factory=Rules)
    weights: Weights = field(default_factory=Weights)
    function: Policy | None = None
    crews: int | None = None
    shortcut: bool = True
    checked: bool = False
    """Whether the invariants are checked after every event."""

    hall: FleetState = field(init=False)
    _state: State = field(init=False)
    _brain: PolicyAdapter = field(init=False)
    _crews: Crews = field(init=False)
    _engine: Engine = field(default_factory=Engine)
    _where: TimeBreakdown = field(default_factory=TimeBreakdown)
    _rungs: dict[str, int] = field(default_factory=dict)
    _phase: _Phase = _Phase.TRAINING
    _since_s: float = 0.0
    """When the phase began."""
    _broken_s: float = 0.0
    """When the world broke, from which the wait is counted."""
    _due_s: float = 0.0
    """When the stopped job is launched again."""
    _turn: int = 0
    """A counter: what was scheduled for the job in an older turn is dropped."""
    _restarts: int = 0
    _absorbs: int = 0
    _strikes: int = 0
    _breaks: int = 0
    _short_s: float = 0.0
    _over: bool = False
    _due: dict[str, float] = field(default_factory=dict)
    """The seconds of the present phase, by cost, if nothing interrupts it."""
    _charged: dict[str, float] = field(default_factory=dict)
    _gone_since: dict[UnitFailure, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hall = FleetState(self.fleet, self.job, shortcut=self.shortcut)
        self._state = State(self.fleet, self.job, self.costs, self.intervals, self._where)
        self._brain = PolicyAdapter(self.costs, self.rules, self.weights, self.function)
        self._crews = Crews(self.crews)

    def run(self) -> FleetOutcome:
        """Simulate the run, and return its outcome. It can be called once."""
        for at_s, strike in self.source.begin():
            self._engine.at(round(at_s * NS), self._strike, strike)
        self._engine.at(round(self.horizon_s * NS), self._end, priority=LAST)
        while not self._over and self._engine.step():
            if self.checked:
                self.hall.check()
        self._enter(self._phase)
        assert abs(self._where.total() - self.horizon_s) < 1e-6 * self.horizon_s, "time that is nowhere"
        return FleetOutcome(
            wall_s=self.horizon_s,
            gpus=self.fleet.total_gpus,
            ranks=self.job.ranks(self.fleet),
            steps=self._state.steps,
            where=self._where,
            strikes=self._strikes,
            breaks=self._breaks,
            rungs=dict(sorted(self._rungs.items())),
            events=self._engine.ran,
            short_s=self._short_s,
            queued_max=self._crews.queued_max,
            charged=dict(sorted(self._charged.items())),
        )

    @property
    def _now_s(self) -> float:
        return self._engine.now_s

    def _end(self) -> None:
        self._over = True

    # -- the hardware --------------------------------------------------------------------------------------------------
    def _strike(self, strike: UnitFailure) -> None:
        self._strikes += 1
        if strike.stalls:
            self._next(strike)
            if self._phase is _Phase.TRAINING:
                self._begin_break()
                self._break()
            return
        slots = self._slots(strike)
        lost = self.hall.strike(slots, hardware=strike.repair_s > 0)
        if lost and self._phase is _Phase.TRAINING:
            self._begin_break()  # what was trained is counted before the memory of trays is gone
        if strike.domain in ("tray", "rack") and strike.repair_s > 0:
            for tray in range(self.hall.tray_of(slots.start), self.hall.tray_of(slots.stop - 1) + 1):
                self._state.tray_gone(tray)
        if strike.repair_s > 0:
            self._gone_since[strike] = self._now_s
            if self._crews.take(strike):
                self._engine.after(strike.repair_s, self._repaired, strike, priority=FIRST)
        else:
            self._next(strike)
            self._start(self.hall.in_order(slots))
        if lost and self._phase is not _Phase.STOPPED:
            self._break()

    def _repaired(self, strike: UnitFailure) -> None:
        self._brain.repaired(self._now_s - self._gone_since.pop(strike))
        following = self._crews.done()
        if following is not None:
            self._engine.after(following.repair_s, self._repaired, following, priority=FIRST)
        self._next(strike)
        slots = slots_of(self.fleet, strike)
        self.hall.repaired(slots)
        self._start(self.hall.in_order(slots))
        if self._phase is _Phase.STOPPED and self._now_s >= self._due_s:
            self._relaunch(self._turn)
        elif self._phase is _Phase.WAITING:
            self._decide(self._turn)

    def _slots(self, strike: UnitFailure) -> range:
        if strike.domain != "rank":
            return slots_of(self.fleet, strike)
        slot = int(self.hall.seats[strike.unit % self.hall.ranks])
        return range(slot, slot + 1)

    def _next(self, strike: UnitFailure) -> None:
        following = self.source.again(strike, self._now_s)
        if following is not None:
            self._engine.at(round(following[0] * NS), self._strike, following[1])

    def _start(self, slots: Sequence[int]) -> None:
        if slots:
            self._engine.after(self.costs.start_s, self._started, self.hall.stamps(slots), priority=FIRST)

    def _started(self, stamps: SlotStamps) -> None:
        if not self.hall.started(stamps):
            return
        if self._phase is _Phase.WAITING:
            self._decide(self._turn)
        elif self._phase is _Phase.TRAINING:
            self._grow()

    # -- the job -------------------------------------------------------------------------------------------------------
    def _begin_break(self) -> None:
        self._enter(_Phase.DETECTING)
        self._broken_s = self._now_s
        self._breaks += 1

    def _break(self) -> None:
        """Something is wrong, which is soon known. All failures until then lead to one decision."""
        if self._phase is _Phase.WAITING:
            self._decide(self._turn)
        elif self._phase is not _Phase.DETECTING or self._broken_s == self._now_s:
            self._enter(_Phase.DETECTING)
            self._due = {"detect_s": self.costs.detect_s}
            self._later(self.costs.detect_s, self._decide)

    def _decide(self, turn: int) -> None:
        if turn != self._turn:
            return
        asks = self._brain.asks_who_takes_over or not self.shortcut
        staff = self.hall.staff() if self.hall.lost and asks else None
        rollback = self._state.rollback(self.hall)
        situation = Situation(
            step=self._state.steps - 1,
            step_s=self.costs.step_s * self._slow,
            rollback=rollback,
            checkpoint_age_s=(self._state.steps - self._state.checkpoint) * self.costs.step_s,
            waited_s=self._now_s - self._broken_s,
            restarts_left=max(self.job.max_restarts - self._restarts, 0),
            absorbs=self._absorbs,
        )
        decision = self._brain.decide(self.hall, staff, situation)
        if decision.rung not in (Rung.WAIT, Rung.HOLD) or self._phase is not _Phase.WAITING:
            self._count(decision.rung.value)
        self._carry_out(decision, staff, rollback)

    def _carry_out(self, decision: Decision, staff: NewSlots | None, rollback: int | None) -> None:
        costs, rung = self.costs, decision.rung
        match rung:
            case Rung.ABSORB:
                self._absorbs += 1
                self._recover(0, regroup_s=costs.regroup_s)
            case Rung.SWAP | Rung.MOVE:
                assert staff is not None
                assert rollback is not None
                moving = bool(staff.uprooted)
                self._start(self.hall.take(staff))
                self._recover(rollback, takeover_s=costs.takeover_s, regroup_s=costs.regroup_s if moving else 0.0)
            case Rung.SHRINK:
                assert rollback is not None
                freed = self.hall.drop(self.hall.hit())
                self._recover(rollback, regroup_s=costs.regroup_s, reenter_s=costs.reenter_s)
                self._start(freed)
            case Rung.WAIT:
                self._enter(_Phase.WAITING)
                self._later(decision.deadline_s, self._decide)
            case Rung.HOLD:  # nobody ends it but a repair
                self._enter(_Phase.WAITING)
                self._turn += 1
            case Rung.RESTART:
                self._restarts += 1
                self._state.from_disk()
                self.hall.begin_again()
                self._recover(0, start_s=costs.start_s, load_s=costs.load_s)
            case Rung.STOP:
                self._enter(_Phase.STOPPED)
                self._state.from_disk()
                self._due_s = self._now_s + costs.relaunch_s
                self._later(costs.relaunch_s, self._relaunch)
            case Rung.ACQUIRE:
                raise AssertionError("the planner has no provider")
            case _:
                assert_never(rung)

    def _recover(self, rollback: int, **seconds: float) -> None:
        """Roll back ``rollback`` steps and recover. ``seconds``: the time that it takes, by cost."""
        self._state.go_back(rollback)
        self._resume_after(seconds)

    def _resume_after(self, seconds: dict[str, float]) -> None:
        self._enter(_Phase.RECOVERING)
        self._due = {**seconds, "first_step_s": self.costs.first_step_s}
        self._later(sum(self._due.values()), self._resume)

    def _resume(self, turn: int) -> None:
        if turn == self._turn:
            self._enter(_Phase.TRAINING)
            self._turn += 1
            self._grow()

    def _grow(self) -> None:
        """Let replicas that were dropped come back at a step boundary: nothing is computed again."""
        replicas = self.hall.joinable()
        if replicas:
            self._enter(_Phase.RECOVERING)  # what was trained before counts for the smaller world
            self.hall.join(replicas)
            self._count("grow")
            self._resume_after({"takeover_s": self.costs.takeover_s, "reenter_s": self.costs.reenter_s})

    def _relaunch(self, turn: int) -> None:
        """Start the stopped job again by the same command, from the newest checkpoint, with as many replicas as fit.

        If too few fit, it waits for a repair.
        """
        if turn == self._turn and self.hall.relaunch():
            self._restarts = 0
            self._count("relaunch")
            self._recover(0, start_s=self.costs.start_s, load_s=self.costs.load_s)

    # -- time ----------------------------------------------------------------------------------------------------------
    @property
    def _slow(self) -> float:
        return self._state.slow(self.hall.replicas, self.hall.full)

    def _enter(self, phase: _Phase) -> None:
        """Account for the time since the last change of phase, and enter ``phase``."""
        seconds, where = self._now_s - self._since_s, self._where
        match self._phase:
            case _Phase.TRAINING:
                self._state.train(seconds, self._slow)
                self._short_s += seconds if self.hall.replicas < self.hall.full else 0.0
                self._absorbs = 0 if seconds > self.costs.step_s else self._absorbs
            case _Phase.DETECTING:
                where.detecting += seconds
                self._charge(seconds)
            case _Phase.RECOVERING:
                where.recovering += seconds
                self._charge(seconds)
            case _Phase.WAITING:
                where.waiting += seconds
            case _Phase.STOPPED:
                where.stopped += seconds
            case _:
                assert_never(self._phase)
        self._phase, self._since_s = phase, self._now_s

    def _charge(self, seconds: float) -> None:
        """Charge the time of a detection or recovery to its costs. It is shorter than was due if something came in
        between."""
        due, self._due = self._due, {}
        total = sum(due.values())
        for name, part in due.items():
            if part:
                self._charged[name] = self._charged.get(name, 0.0) + seconds * part / total

    def _later(self, seconds: float, do: Callable[[int], None]) -> None:
        """Call ``do`` after ``seconds``, unless something else comes first."""
        self._turn += 1
        self._engine.after(seconds, do, self._turn)

    def _count(self, what: str) -> None:
        self._rungs[what] = self._rungs.get(what, 0) + 1
