"""From a loss to the next generation: break, gather, park, decide, resume.

Survivors are broken at once; the gather window only delays the decision, so that faults that belong together (a tray is
many workers) are one. The decision is taken when the window has closed, every survivor has parked, and every lost rank
has a spare that is ready. It is taken from fresh reports alone, so a loss in the middle of a recovery is nothing
special: it breaks once more, and the next plan starts from what everyone reports then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rackrun.core import verdict
from rackrun.core.commands import BreakGeneration, Command, Plan, ResumeGeneration, SetTimer, StartWorker
from rackrun.core.config import JobConfig
from rackrun.core.events import (
    WorkerParked,
    WorkerResumed,
    WorkerSevered,
    WorkerStalled,
)
from rackrun.core.ids import BEGIN, Position, Rank, SlotId
from rackrun.core.protection import protect
from rackrun.core.rack import RackMachine
from rackrun.core.seating import Seating
from rackrun.core.snapshots import Snapshots
from rackrun.core.sources import Sources, named
from rackrun.core.stalls import StallWindow
from rackrun.core.verdict import StatePlan
from rackrun.core.workers import Loss, Trigger, WorkerRecord, WorkerState
from rackrun.core.world import Phase, World

__all__ = ["ABSORBS_MAX", "STALL_PATIENCE_MS", "Ladder", "Recovery", "named"]

ABSORBS_MAX = 3
"""Steps done again in place, in a row, without one that is committed."""
FEW_STEPS = 10
"""Done again without asking: at the beginning, copies are not everywhere yet."""
STALL_GATHER_MS = 50
STALL_PATIENCE_MS = 500
"""How long those that have not reported a stall are waited for, after the first window."""


class Ladder(Protocol):
    """What recovery cannot decide alone."""

    def trained(self, at_ms: int) -> None: ...
    def restart(self, because: str, loss: Loss | None, at_ms: int) -> None: ...
    def stop(self, exit_code: int, because: str, *, remedy: str = "") -> None: ...
    def start_spare(self, slot: SlotId) -> StartWorker: ...
    def await_fit(self, what: str) -> None: ...


@dataclass(slots=True)
class Recovery:
    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    ladder: Ladder
    emit: Callable[[Command], None]
    stalls: StallWindow = field(default_factory=StallWindow)
    classes: dict[Rank, str] = field(default_factory=dict)
    sources: Sources = field(init=False)
    _gathering: bool = False
    _owed: bool = False
    """The snapshots of condemned workers are worth waiting for."""
    _absorbing: bool = False
    _note: str = ""
    """Why the generation was broken, if nobody is lost."""
    _absorbs: int = 0
    _absorbed_at: Position | None = None
    _losses: dict[Rank, Loss] = field(default_factory=dict)
    """Since the last plan."""
    _stuck_at: Position | None = None
    _stuck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = Sources(self.world, self.rack, self.plan_again)

    @property
    def snapshots(self) -> Snapshots:
        return self.sources.snapshots

    # -- losses ----------------------------------------------------------------------------------------------------
    def lose(self, losses: Sequence[Loss], at_ms: int) -> None:
        """Members are gone, or condemned: they take no part from now on."""
        for loss in losses:
            rank = loss.record.rank
            assert rank is not None
            del self.world.members[rank]
            self._losses[rank] = loss
        self._absorbing = False
        if self.world.phase is Phase.PARKING:
            self.decide(at_ms)
        else:
            self._break(self._told(), at_ms)

    def plan_again(self, because: str, at_ms: int) -> None:
        """Nobody is lost, but what was planned cannot be done."""
        self._note = because
        self._break(because, at_ms)

    def forget_all(self) -> None:
        """The world begins again: nothing of the old one counts."""
        self.snapshots.clear()
        self._losses.clear()
        self.stalls = StallWindow()
        self._absorbing = False

    def _told(self) -> str:
        """What was lost since the last plan: ``ranks 2, 3 lost (SIGKILL)``."""
        if not self._losses:
            return self._note
        reasons = dict.fromkeys(loss.because for _, loss in sorted(self._losses.items()))
        return f"{named(sorted(self._losses))} lost ({', '.join(reasons)})"

    # -- break and park --------------------------------------------------------------------------------------------
    def _break(self, because: str, at_ms: int) -> None:
        world = self.world
        generation = world.next_generation()
        world.phase = Phase.PARKING
        world.reason = because
        self.stalls = StallWindow()
        self._gathering = self._owed = True
        for record in world.members.values():
            record.move(Trigger.BREAK, f"generation {generation}")
            record.parked = None
        if world.members:
            self.emit(BreakGeneration(generation=generation, workers=world.workers(), because=because))
        self.emit(SetTimer(name=f"gather:{generation}", at_ms=at_ms + self.config.gather_ms))
        self.emit(SetTimer(name=f"park:{generation}", at_ms=at_ms + self.config.park_timeout_ms))
        self.emit(SetTimer(name=f"recover:{generation}", at_ms=at_ms + self.config.join_timeout_ms))

    def parked(self, record: WorkerRecord, event: WorkerParked) -> None:
        if event.generation != self.world.generation or record.state is not WorkerState.BREAKING:
            return
        record.move(Trigger.PARKED)
        record.parked = event
        self.learn_class(record, event.replica_class)
        self.decide(event.at_ms)

    def learn_class(self, record: WorkerRecord, replica_class: str) -> None:
        if record.rank is not None and replica_class:
            self.classes[record.rank] = replica_class

    def timer(self, name: str, at_ms: int) -> None:
        """``kind:generation``; what an older generation asked for is ignored."""
        kind, _, generation = name.partition(":")
        if generation != str(self.world.generation):
            return
        parking, resuming = self.world.phase is Phase.PARKING, self.world.phase is Phase.RESUMING
        if kind == "gather" and parking:
            self._gathering = False
            self.decide(at_ms)
        elif kind == "park" and parking:
            self.emit(SetTimer(name=f"owed:{generation}", at_ms=at_ms + self.config.park_timeout_ms))
            self._fence_late(WorkerState.BREAKING, "park", self.config.park_timeout_ms, at_ms)
        elif kind == "owed" and parking:
            self._owed = False
            self.decide(at_ms)
        elif kind == "resume" and resuming:
            self._fence_late(WorkerState.RESUMING, "resume", self.config.resume_timeout_ms, at_ms)
        elif kind == "recover" and parking:
            self._give_up()
        elif kind in ("stalled", "judge"):
            self._window_closed(kind, at_ms)

    def _fence_late(self, state: WorkerState, what: str, timeout_ms: int, at_ms: int) -> None:
        late = [record for _, record in sorted(self.world.members.items()) if record.state is state]
        newcomers = [record for record in late if not record.stateful]
        if state is WorkerState.RESUMING and newcomers:
            late = newcomers  # the others wait for them, with what may be the only copies
        if late:
            self._condemn(late, f"did not {what} within {timeout_ms} ms", at_ms)

    def _condemn(self, records: Sequence[WorkerRecord], because: str, at_ms: int, *, fault: bool = True) -> None:
        for record in records:
            self.emit(self.rack.fence(record, because, fault=fault))
        self.lose([Loss(record=record, because=because) for record in records], at_ms)

    def _give_up(self) -> None:
        lost, ready, unfit = self.world.lost(), len(self.rack.ready_spares()), self.rack.unfit()
        told = f"{len(lost)} ranks to replace, {ready} spares are ready"
        self.ladder.stop(
            3,
            f"generation {self.world.generation} was not recovered within {self.config.join_timeout_ms} ms: "
            f"{self._told()}; {told}{f'; not fit: {unfit}' if unfit else ''}",
            remedy="repair the GPUs that are not fit, or start more trays."
            if unfit
            else "look at the output of the spares; raise join_timeout_ms if a start takes longer.",
        )

    # -- decide ----------------------------------------------------------------------------------------------------
    def decide(self, at_ms: int) -> None:
        """If all that a decision needs is known, take it."""
        world = self.world
        if world.phase is not Phase.PARKING or self._gathering:
            return
        if any(record.state is not WorkerState.PARKED for record in world.members.values()):
            return
        reports = {rank: _report(record) for rank, record in world.stateful().items()}
        committed, gate = verdict.committed(reports, *world.floor())
        state = verdict.state_plan(
            reports=reports,
            kept=self.snapshots.by_rank(),
            classes=self.classes,
            world_size=world.size,
            upto=committed,
            torn=world.torn(),
            rebuild=self.snapshots.rebuilding(world.stateful(), self.rack.trays),
        )
        if (state is None or state.rollback is not None) and self._snapshots_owed():
            return
        if state is None:
            self._start_over(committed, at_ms)
            return
        chosen = self._staff(at_ms)
        if chosen is not None and self._may_go_on(committed):
            self._resume(committed, gate, state, chosen, at_ms)

    def _snapshots_owed(self) -> bool:
        """Somebody is condemned whose exit, with what it leaves, has not come yet."""
        return self._owed and any(
            record.rank is not None and record.stateful and not record.alive for record in self.rack.occupants.values()
        )

    def _start_over(self, committed: Position, at_ms: int) -> None:
        first = next((loss for _, loss in sorted(self._losses.items())), None)
        told = self._told() or "a rollback was broken off"
        if self.world.stateful():
            told += " before the first step" if committed == BEGIN else f" at step {committed.step}"
        because = f"{told}, and no copy of its state is left"
        if self.config.start_over or self._has_just_begun(committed):
            self.ladder.restart(because, first, at_ms)
        else:
            self.ladder.stop(
                3,
                because,
                remedy="keep checkpoints on disk (--checkpoint-dir), or let it begin again from step 0 (--lost-state restart).",
            )

    def _has_just_begun(self, committed: Position) -> bool:
        """As far as anybody tells who lives, or has been seen to end."""
        if committed.step >= FEW_STEPS:
            return False
        ends = [loss.exit for loss in self._losses.values()]
        return bool(self.world.stateful()) or all(end is not None and end.step < FEW_STEPS for end in ends)

    def _staff(self, at_ms: int) -> dict[Rank, WorkerRecord] | None:
        """A ready spare for each lost rank; None if they are still to be waited for (or if there is no hope)."""
        lost = self.world.lost()
        ready = {record.worker.slot: record for record in self.rack.ready_spares()}
        staff = self.seating.staff(self.world.seats, lost, ready)
        if staff is None:
            self._wait_for_spares(lost, enough=len(ready) >= len(lost))
            return None
        if staff.uprooted:
            moving = [self.world.members[rank] for rank in staff.uprooted]
            self._condemn(moving, ", ".join(dict.fromkeys(staff.uprooted.values())), at_ms, fault=False)
            return None
        return {rank: ready[slot] for rank, slot in staff.seats.items()}

    def _wait_for_spares(self, lost: Mapping[Rank, SlotId], *, enough: bool) -> None:
        """Start what can be started; without any hope the job ends. ``enough``: NVLink does not reach those that are ready."""
        free = self.rack.free_slots()
        in_place = [slot for slot in lost.values() if slot in free]
        elsewhere = [slot for slot in free if slot not in in_place]
        short = len(free) if enough else len(lost) - len(self.rack.fit_spares())
        for slot in (in_place + elsewhere)[: max(short, 0)]:
            self.emit(self.ladder.start_spare(slot))
        coming = len(self.rack.fit_spares()) + len(self.rack.clearing_slots())
        hopes = [slot for slot in self.rack.slots() if slot not in self.world.seated() and self.rack.may_come(slot)]
        none_comes = coming == len(self.rack.ready_spares()) if enough else coming < len(lost)
        if none_comes and hopes and (enough or coming + len(hopes) >= len(lost)):
            self.ladder.await_fit(f"{self._told()}: {len(lost)} ranks to replace")
            return
        if enough:
            if none_comes:
                self.ladder.stop(
                    3,
                    f"{self._told()}: {len(lost)} ranks to replace, and no spare inside their NVLink clique",
                    remedy="hold back spares in every NVLink domain (--spares), or let their group go on over the network "
                    "(--cross-clique).",
                )
        elif none_comes:
            last = f"; the last spare was lost too: {self.rack.last_spare_loss}" if self.rack.last_spare_loss else ""
            self.ladder.stop(
                3,
                f"{self._told()}: {len(lost)} ranks to replace, {coming} spares, no free slot left{last}",
                remedy="hold back more spares (--spares), or start with more trays.",
            )

    def _may_go_on(self, committed: Position) -> bool:
        """Recoveries without progress are counted; too many end the job."""
        told = self._told()
        if committed != self._stuck_at:
            self._stuck_at, self._stuck = committed, []
        self._stuck.append(told)
        if len(self._stuck) > self.config.no_progress_max:
            reasons = "; ".join(dict.fromkeys(self._stuck))
            self.ladder.stop(
                3,
                f"{self.config.no_progress_max} recoveries without one committed step: {reasons}",
                remedy="look at these ranks' output and at the health of their devices.",
            )
            return False
        if not self._absorbing:
            return True
        self._absorbs = self._absorbs + 1 if committed == self._absorbed_at else 1
        self._absorbed_at = committed
        if self._absorbs > ABSORBS_MAX:
            self.ladder.stop(
                3,
                f"the same step was done again {ABSORBS_MAX} times and failed again: {self._note}",
                remedy="look for a collective that not every rank enters, or for a broken fabric (rackctl report).",
            )
            return False
        return True

    # -- resume ----------------------------------------------------------------------------------------------------
    def _resume(
        self,
        committed: Position,
        gate: tuple[float, ...],
        state: StatePlan,
        chosen: dict[Rank, WorkerRecord],
        at_ms: int,
    ) -> None:
        world = self.world
        because = self._explain(committed, state, chosen)
        for rank, spare in chosen.items():
            world.seat(rank, spare)
        for rank, record in world.members.items():
            record.move(Trigger.RESUME, f"generation {world.generation}, rank {rank}")
            record.stateful = record.stateful and rank not in state.fresh
            record.finished = record.finished and rank not in state.fresh and state.rollback is None
        if state.rollback is not None:
            committed = max(committed, Position(state.rollback))
        protection = protect(self.config, world.seats, self.rack)
        world.plan = Plan(
            generation=world.generation,
            world_size=world.size,
            members=world.as_members(state.fresh),
            store=self.rack.store(world.plan.store if world.plan else ""),
            committed=committed,
            gate=gate,
            restores=state.restores,
            mirrors=dict(protection.mirrors),
            sets=protection.sets,
            parity=protection.parity,
            rollback=state.rollback,
        )
        self.snapshots.go_on(world.plan)
        world.phase = Phase.RESUMING
        world.reason = because
        self._losses.clear()
        self._absorbing = False
        self.emit(ResumeGeneration(plan=world.plan, because=because, protected=protection.said))
        self.emit(SetTimer(name=f"resume:{world.generation}", at_ms=at_ms + self.config.resume_timeout_ms))

    def _explain(self, committed: Position, state: StatePlan, chosen: dict[Rank, WorkerRecord]) -> str:
        parts = [self._told()]
        if chosen:
            slots = ", ".join(record.worker.slot for _, record in sorted(chosen.items()))
            left = len(self.rack.ready_spares()) - len(chosen)
            verb = "takes" if len(chosen) == 1 else "take"
            parts.append(f"{slots} {verb} over, {left} {'spare' if left == 1 else 'spares'} left")
        if state.rollback is not None:
            again = max(committed.step - state.rollback, 0)
            parts.append(f"everyone goes back to step {state.rollback}, {again} steps are computed again")
        return "; ".join(part for part in parts if part)

    def resumed(self, record: WorkerRecord, event: WorkerResumed) -> None:
        if event.generation != self.world.generation or record.state is not WorkerState.RESUMING:
            return
        record.move(Trigger.RESUMED)
        record.stateful = True
        record.resumed_in = event.generation
        if self.world.all_members(WorkerState.TRAINING):
            self.world.phase = Phase.TRAINING
            self.ladder.trained(event.at_ms)
            self._judge(event.at_ms)

    # -- nobody is lost --------------------------------------------------------------------------------------------
    def stalled(self, record: WorkerRecord, event: WorkerStalled) -> None:
        """A member does not move. While others resume, the resume timeout is the judge."""
        assert record.rank is not None
        if event.silent:
            self._condemn([record], f"silent for {event.for_ms} ms at step {event.step}", event.at_ms)
        elif self.world.phase in (Phase.TRAINING, Phase.RESUMING):
            if self.stalls.add(record.rank, event):
                window = max(self.config.gather_ms, STALL_GATHER_MS)
                self.emit(SetTimer(name=f"stalled:{self.world.generation}", at_ms=event.at_ms + window))
            self._judge(event.at_ms)

    def severed(self, record: WorkerRecord, event: WorkerSevered) -> None:
        """Nobody is known to be lost, but this generation cannot go on. Whoever does not park is found that way."""
        running = self.world.phase in (Phase.TRAINING, Phase.RESUMING)
        if not running or record.rank is None or event.generation != self.world.generation:
            return
        self.absorb(f"a collective broke on rank {record.rank} ({event.because})", event.at_ms)

    def absorb(self, because: str, at_ms: int) -> None:
        """Nobody is to blame: the step is done again in place."""
        self._absorbing = True
        self._note = because
        self._break(because, at_ms)

    def _window_closed(self, kind: str, at_ms: int) -> None:
        if not self.stalls.reports:
            return
        self.stalls.closed = 1 if kind == "stalled" else 2
        if kind == "stalled":
            self.emit(SetTimer(name=f"judge:{self.world.generation}", at_ms=at_ms + STALL_PATIENCE_MS))
        self._judge(at_ms)

    def _judge(self, at_ms: int) -> None:
        if self.world.phase is not Phase.TRAINING or not self.stalls.may_judge(self.world.members):
            return
        finished = sorted(rank for rank, record in self.world.members.items() if record.finished)
        if finished:
            waiting = sorted(rank for rank, record in self.world.members.items() if not record.finished)
            self.ladder.stop(
                1,
                f"{named(finished)} returned from main, while {named(waiting)} wait in a step for all ranks",
                remedy="let all ranks leave the loop after the same step.",
            )
            return
        blame = self.stalls.judge(self.world.size)
        if blame.ranks:
            self._condemn([self.world.members[rank] for rank in blame.ranks], f"stalled {blame.because}", at_ms)
            return
        self.absorb(f"stalled: {blame.because}", at_ms)


def _report(record: WorkerRecord) -> verdict.Report:
    parked = record.parked
    assert parked is not None
    return verdict.Report(passed=parked.passed, entered=parked.entered, gate=parked.gate, snapshots=parked.snapshots)
