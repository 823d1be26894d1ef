"""Recovery from a loss to the next generation: break, gather, park, decide, resume.

Survivors are broken at once. The gather window only delays the decision, so that faults that belong together (a tray
has many workers) lead to one decision. It is taken when the window has closed, every survivor has parked, and every
lost rank has a ready spare, or when the policy (`rackrun.core.recovery.ask_policy`) wants something else. It depends on
fresh reports alone. So a loss during a recovery needs no special handling: the generation is broken once more, and the
next plan starts from the reports of that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rackrun.core.faults.partition import PartitionReports
from rackrun.core.faults.stalls import Stalls
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.facts import (
    AllTrain,
    Facts,
    RanksRetired,
    RecoveryOverdue,
    RestartDue,
    ShrinkImpossible,
    SlotFreed,
    SlotsNeeded,
)
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_sources import RestoreSources, named
from rackrun.core.generation.snapshot_locations import SnapshotLocations
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.slot_order import natural
from rackrun.core.members.workers import Loss, Trigger, WorkerRecord, WorkerState
from rackrun.core.placement.seating import Seating, Takeovers
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.core.policy.choice import allows, choose
from rackrun.core.recovery.ask_policy import DecisionMaker
from rackrun.core.recovery.failed_recovery import FailedRecovery
from rackrun.core.recovery.fencing import Fencing
from rackrun.core.recovery.hold import Hold
from rackrun.core.recovery.no_progress import NoProgress
from rackrun.core.recovery.parked_members import ParkedMembers
from rackrun.core.recovery.planning import Planner, takeovers_text
from rackrun.core.recovery.view_builder import DecisionInputs, ViewBuilder, failure_of
from rackrun.core.resize.acquiring import RackAcquisition
from rackrun.core.resize.growth_backoff import GrowthBackoff
from rackrun.core.resize.resizing import Resizing
from rackrun.core.resize.spare_top_up import SpareTopUp
from rackrun.core.stragglers.shifting import Shifting
from rackrun.protocol.commands import BreakGeneration, Notice, SetTimer
from rackrun.protocol.events import PolicyAnswered, WorkerParked, WorkerResumed, WorkerSevered, WorkerUnbuilt
from rackrun.protocol.ids import BEGIN, Generation, Position, Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import ClusterView, Decision, Failure, Rung
from rackrun.protocol.timers import CondemnedExitsOver, GatherOver, ParkOver, RecoverOver, RepairOver, ResumeOver

__all__ = ["ABSORBS_MAX", "Recovery", "named"]

STATE_LOST = "rackrun.errors.StateLost"
"""Type of the error with which a newcomer exits when its sources differ from each other."""
ABSORBS_MAX = 3
"""How many times in a row a step may be repeated in place without a committed step."""


@dataclass(slots=True)
class Recovery:
    """Breaks a generation, decides how to go on, and begins the next generation."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    out: Outbox
    facts: Facts
    end: JobEnd
    view_builder: ViewBuilder
    decision_maker: DecisionMaker
    triage: Triage
    shifting: Shifting
    acquiring: RackAcquisition
    spare_top_up: SpareTopUp
    failed_recovery: FailedRecovery = field(init=False)
    hold: Hold = field(init=False)
    fencing: Fencing = field(init=False)
    stalls: Stalls = field(init=False)
    classes: dict[Rank, str] = field(default_factory=dict)
    sources: RestoreSources = field(init=False)
    planner: Planner = field(init=False)
    resizing: Resizing = field(init=False)
    partition_reports: PartitionReports = field(default_factory=PartitionReports)
    parked_members: ParkedMembers = field(init=False)
    wishes: dict[Rank, SlotId] = field(default_factory=dict)
    """Spares' slots that operators have chosen for ranks."""
    _gathering: bool = False
    _owed: bool = False
    """Whether it is worth waiting for the snapshots of condemned workers."""
    _awaits_silent: bool = False
    """Whether a tray of which nothing has come since the generation was broken is, or was, waited for."""
    _absorbing: bool = False
    _note: str = ""
    """Why the generation was broken, if no rank is lost."""
    _losses: dict[Rank, Loss] = field(default_factory=dict)
    """Losses since the last plan, by rank."""
    _retired: dict[Rank, Loss] = field(default_factory=dict)
    """Losses of the ranks in `World.retired`."""
    _moved: dict[Rank, None] = field(default_factory=dict)
    """Ranks among the losses that were alive and were taken out because their group moves."""
    between_steps: bool = False
    """Whether all ranks stood between two steps when the first of them was taken out."""
    growing: bool = False
    """Whether all ranks were paused so that others can join."""
    leaving: tuple[Rank, ...] = ()
    """Ranks to remove, as an operator asked; all ranks were paused for it."""
    _resized: str = ""
    """Description of how the next plan changes the world's size."""
    waits: str = ""
    """The failure and the decision because of which all ranks wait; "": the latest decision was another."""
    nothing_comes: bool = False
    """Whether all ranks wait, and nothing that is under way ends it: neither workers that start nor GPUs or trays that
    are expected back."""
    _late: bool = False
    """Whether members took longer to park than usual, and are still awaited."""
    _waits_since_ms: int = 0
    """When the generation was broken or, if members took longer to park than usual, when the last of them had."""
    _limits_anew: bool = False
    """Whether the limits of a wait were set once more, so that an earlier timer may still fire."""
    _progress: NoProgress = field(init=False)

    def __post_init__(self) -> None:
        self.hold = Hold(self.world, self.rack, self.out)
        self.fencing = Fencing(self.world, self.rack, self.out)
        self.sources = RestoreSources(self.world, self.rack, self.facts)
        self.failed_recovery = FailedRecovery(self.config, self.world, self.rack, self.end)
        self.planner = Planner(
            self.config, self.world, self.rack, self.sources, self.shifting, self.out, self.partition_reports
        )
        self.stalls = Stalls(self.config, self.world, self.out, self.facts, self.end)
        self._progress = NoProgress(self.config.no_progress_max)
        growth = GrowthBackoff(self.out)
        self.resizing = Resizing(self.config, self.world, self.rack, self.seating, self.sources, self.classes, growth)
        self.parked_members = ParkedMembers(
            self.config,
            self.world,
            self.rack,
            self.sources,
            self.classes,
            self.resizing,
            self.view_builder,
            self._losses,
        )

    @property
    def snapshots(self) -> SnapshotLocations:
        """The known snapshots."""
        return self.sources.snapshots

    # -- losses ----------------------------------------------------------------------------------------------------
    def lose(self, losses: Sequence[Loss], at_ms: int) -> None:
        """Handle lost or condemned members, which take no part from now on.

        A rank that had finished training is not replaced as long as no other rank is lost.
        """
        if self.world.phase is Phase.TRAINING and all(loss.record.finished for loss in losses):
            self._retire(losses)
            return
        for loss in losses:
            rank = loss.record.rank
            assert rank is not None
            self.world.lose(rank)
            self.stalls.window.forget(rank)
            self.hold.silent.pop(rank, None)
            self.forget_members()
            self._losses[rank] = loss
            self.world.doubted |= loss.failure is not None and loss.failure.type == STATE_LOST
        self._absorbing = False
        self.leaving = ()  # the operator's request has to wait: the loss comes first
        if self.world.phase is Phase.PARKING:
            self._owe_again(at_ms)
            self.decide(at_ms)
        else:
            self._break(self._told(), at_ms)

    def _owe_again(self, at_ms: int) -> None:
        """Wait once more for the snapshots of condemned workers. One may be condemned long after that wait was over,
        while all ranks wait for hardware."""
        if not self._owed:
            self._owed = True
            if self._snapshots_owed():
                timer = CondemnedExitsOver(self.world.generation)
                self.out.emit(SetTimer(timer=timer, at_ms=at_ms + self.config.park_timeout_ms))
            else:
                self._owed = False

    def seen_to_end(self, loss: Loss) -> None:
        """Record the exit of a member that was counted as lost when it was fenced. It shows how far the member had
        come."""
        for rank, known in self._losses.items():
            if known.record is loss.record and known.exit is None:
                self._losses[rank] = Loss(record=known.record, because=known.because, exit=loss.exit)

    def _retire(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            rank = loss.record.rank
            assert rank is not None
            self.world.retire(rank)
            self.stalls.window.forget(rank)
            self._retired[rank] = loss
        self.facts.add(RanksRetired(losses))

    def plan_again(self, because: str, at_ms: int) -> None:
        """Break the generation although no rank is lost, because its plan cannot be carried out."""
        self._note = because
        self._break(because, at_ms)

    def forget_all(self) -> None:
        """Forget everything about the old world, because the world begins again."""
        self.snapshots.clear()
        self.resizing.growth.joined((), BEGIN)
        self.world.old, self.world.layout = None, Generation(0)
        self.world.trust()
        self._settle()
        self._retired.clear()
        self.stalls.forget()
        self.hold.silent.clear()

    def _settle(self) -> None:
        self._losses.clear()
        self._moved.clear()
        self.between_steps = self.growing = False
        self.leaving = ()
        self._absorbing = False
        self._resized = ""

    def _told(self) -> str:
        """Describe what was lost since the last plan: ``ranks 2, 3 lost (SIGKILL)``. A worker whose state is wrong is
        not lost: it is taken out."""
        if not self._losses:
            return self._note
        wrong = {rank: loss for rank, loss in self._losses.items() if loss.record.corrupt and loss.exit is None}
        lost = {rank: loss for rank, loss in self._losses.items() if rank not in wrong}
        told = []
        for losses, what in ((lost, "lost"), (wrong, "taken out")):
            reasons = dict.fromkeys(loss.because for _, loss in sorted(losses.items()))
            told += [f"{named(sorted(losses))} {what} ({', '.join(reasons)})"] if losses else []
        return "; ".join(told)

    # -- break and park --------------------------------------------------------------------------------------------
    def _break(self, because: str, at_ms: int) -> None:
        """Begin the next generation by breaking the present one on all members."""
        world = self.world
        for rank in world.retired:
            self._losses[rank] = self._retired[rank]
        self._retired.clear()
        world.miss_retired()
        self.forget_members()
        generation = world.next_generation()
        world.enter(Phase.PARKING, because)
        self.stalls.forget()
        self.hold.silent.clear()
        self.partition_reports.attempt()
        self._gathering = self._owed = True
        self._awaits_silent = False
        self._waits_since_ms, self._late, self._limits_anew = at_ms, False, False
        self.waits, self.nothing_comes = "", False
        note = f"generation {generation}"
        for record in world.members.values():
            record.move(Trigger.BREAK, note)
            record.parked = None
        world.await_all()
        if world.members:
            self.out.emit(BreakGeneration(generation=generation, workers=world.workers(), because=because))
        self.out.emit(SetTimer(timer=GatherOver(generation), at_ms=at_ms + self.config.gather_ms))
        self.out.emit(SetTimer(timer=ParkOver(generation), at_ms=at_ms + self.config.park_timeout_ms))
        self.out.emit(SetTimer(timer=RecoverOver(generation), at_ms=at_ms + self.config.join_timeout_ms))
        if self.config.repair_patience_ms:
            self.out.emit(SetTimer(timer=RepairOver(generation), at_ms=at_ms + self.config.repair_patience_ms))

    def parked(self, record: WorkerRecord, event: WorkerParked) -> None:
        """Record that a member has parked; decide if it was the last."""
        if record.state is not WorkerState.BREAKING:
            return
        world = self.world
        assert record.rank is not None, "only members are told to park"
        record.move(Trigger.PARKED)
        record.parked = event
        world.answered(record.rank)
        if not record.stateful and self._had_resumed(record, event):
            record.stateful = True
            record.resumed_in = world.plan.generation if world.plan is not None else record.resumed_in
        self.learn_class(record, event.replica_class)
        if not world.awaited:
            self.decide(event.at_ms)

    def _had_resumed(self, record: WorkerRecord, event: WorkerParked) -> bool:
        """Return whether the worker resumed in the broken generation, with a state that nobody has found wrong, although
        its report did not arrive."""
        if self.world.plan is not None and record.wrong_in == self.world.plan.generation:
            return False
        if self.world.old is not None:
            return event.layout == self.world.layout
        plan = self.world.plan
        return plan is not None and record.resumed_in < event.resumed == plan.generation

    def learn_class(self, record: WorkerRecord, replica_class: str) -> None:
        """Record the replica class of a worker's rank."""
        if record.rank is not None and replica_class:
            self.classes[record.rank] = replica_class

    def gather_over(self, at_ms: int) -> None:
        """Decide, because the losses that belong together have arrived."""
        if self.world.phase is Phase.PARKING:
            self._gathering = False
            self.decide(at_ms)

    def park_over(self, at_ms: int) -> None:
        """Condemn the members that have not parked, and wait for what they leave."""
        generation, timeout_ms = self.world.generation, self.config.park_timeout_ms
        if self.world.phase is not Phase.PARKING:
            return
        if self._some_work(WorkerState.BREAKING, at_ms):
            self._late = True
            self.out.emit(SetTimer(timer=ParkOver(generation), at_ms=at_ms + timeout_ms))
            return
        if silent := self._silent_trays_to_await():
            self._awaits_silent = self._late = True
            self.out.emit(SetTimer(timer=ParkOver(generation), at_ms=at_ms + self.config.lease_ms))
            what = f"nothing has come from {', '.join(silent)} since {self._told()}; its ranks are waited for"
            self.out.emit(Notice(text=f"{what}, up to the lease of {self.config.lease_ms / 1e3:g} s"))
        elif self._awaits_silent:
            timeout_ms += self.config.lease_ms
        self.out.emit(SetTimer(timer=CondemnedExitsOver(generation), at_ms=at_ms + self.config.park_timeout_ms))
        self._fence_late(WorkerState.BREAKING, "park", timeout_ms, at_ms, but=silent)

    def _silent_trays_to_await(self) -> list[TrayId]:
        """Return the trays to wait for although none of their members has parked in time; []: there are none, or they
        have been waited for, or nothing would come of it.

        A running worker parks at once, and a running agent reports one that does not. So a tray of which neither has
        come stands still, is cut off or is lost, and either it is back within its lease or it is given up then. It is
        not waited for if its ranks can be replaced at once, without a loss.
        """
        if self._awaits_silent:
            return []
        world = self.world
        late = {rank: one for rank, one in world.members.items() if one.state is WorkerState.BREAKING}
        heard = [tray_of(record.worker.slot) for rank, record in world.members.items() if rank not in late]
        silent = {tray for record in late.values() if (tray := tray_of(record.worker.slot)) not in heard}
        copies = {self.classes.get(rank, "") for rank in world.stateful() if rank not in late} - {""}
        may_swap = len(self.rack.ready_spares()) >= len(world.lost()) + len(late)
        if may_swap and all(self.classes.get(rank) in copies for rank, record in late.items() if record.stateful):
            return []
        return sorted(silent, key=natural)

    def owed_over(self, at_ms: int) -> None:
        """Decide without the snapshots that condemned workers may still leave."""
        if self.world.phase is Phase.PARKING:
            self._owed = False
            self.decide(at_ms)

    def resume_over(self, at_ms: int) -> None:
        """Condemn the members that have not resumed."""
        if self.world.phase is not Phase.RESUMING:
            return
        if self._some_work(WorkerState.RESUMING, at_ms):
            timer = ResumeOver(self.world.generation)
            self.out.emit(SetTimer(timer=timer, at_ms=at_ms + self.config.park_timeout_ms))
            return
        self._fence_late(WorkerState.RESUMING, "resume", self.planner.timeout_ms(), at_ms)

    def recover_over(self, at_ms: int) -> None:
        """Decide once more. If that leads to nothing, `give_up` follows."""
        if self.world.phase is Phase.PARKING:
            self.decide(at_ms)
            self.facts.add(RecoveryOverdue())

    def repair_over(self, at_ms: int) -> None:
        """Decide again, because hardware has been waited for long enough."""
        if self.world.phase is Phase.PARKING and not self.hold.holds:
            self.decision_maker.forget()
            self.decide(at_ms)

    def _some_work(self, state: WorkerState, at_ms: int) -> bool:
        """Return whether a member is late because it works in its own code.

        All other members wait for it, and none is to blame. Its agent decides how long it may work (`WorkerStalled`).
        """
        members = self.world.members
        return any(rank in members and members[rank].state is state for rank in self.stalls.awaited(at_ms))

    def _fence_late(
        self, state: WorkerState, what: str, timeout_ms: int, at_ms: int, *, but: Sequence[TrayId] = ()
    ) -> None:
        """Condemn the members that did not park or resume in time, but not those on the trays ``but``."""
        late = [
            record
            for rank, record in sorted(self.world.members.items())
            if record.state is state
            and not self.partition_reports.has_reported(rank)
            and tray_of(record.worker.slot) not in but
        ]
        if state is WorkerState.RESUMING:
            # the others wait for these, and may hold the only copies of their state
            idle = self.stalls.idle()
            newcomers = [record for record in late if not record.stateful]
            late = newcomers or [record for record in late if record.rank in idle] or late
        if late:
            self.condemn(late, f"did not {what} within {timeout_ms} ms", at_ms)
        elif state is WorkerState.RESUMING:
            self._judge_partition(at_ms)

    def condemn(self, records: Sequence[WorkerRecord], because: str, at_ms: int, *, fault: bool = True) -> None:
        """Fence these living workers and handle them as lost. ``because``: the reason that is shown."""
        for record in records:
            self.fencing.fence(record, because, fault=fault)
        self.lose([Loss(record=record, because=because) for record in records], at_ms)

    def leave_silent(self, record: WorkerRecord, because: str, at_ms: int) -> bool:
        """Return whether a silent member is left alone: all ranks wait in a hold, and state would be lost with it, or may
        be, because it is not known yet what condemned workers leave. It is judged anew with each further report."""
        rank = record.rank
        if rank is None or not self.hold.holds or record.state is not WorkerState.PARKED or self.world.awaited:
            return False
        if not (self.awaits_snapshots or self.parked_members.loses_state_without(rank)):
            return False
        if rank not in self.hold.silent:
            self.hold.silent[rank] = because
            self.decide(at_ms)
        return True

    def runs_again(self, record: WorkerRecord, at_ms: int) -> None:
        """Decide once more, if this member was silent in a hold."""
        if record.rank is not None and self.hold.silent.pop(record.rank, ""):
            self.decide(at_ms)

    def give_up(self, at_ms: int) -> None:
        """Stop the job if no spare has become ready in time. Waiting for hardware may take longer
        (`JobConfig.repair_patience_ms`), and a hold has no limit. Everything that the last decision has led to is done by now."""
        if self.world.phase is Phase.PARKING and self.world.awaited:
            self._late = True  # nothing could be decided yet; spares get the whole time once it can
            return
        held_ms = self.hold.held_ms(at_ms)
        may_be_early = held_ms or self._limits_anew
        patience_ms = max(self.config.repair_patience_ms, self.config.join_timeout_ms if may_be_early else 0)
        waits = at_ms - self._waits_since_ms - held_ms < patience_ms or self.acquiring.patient(at_ms)
        patient = self.decision_maker.asks or waits or self.hold.holds
        if self.world.phase is Phase.PARKING and not patient:
            self.failed_recovery.not_in_time(self._told())

    # -- decide ----------------------------------------------------------------------------------------------------
    def decide(self, at_ms: int) -> None:
        """Decide how to go on, if everything that the decision needs is known."""
        world = self.world
        if world.phase is not Phase.PARKING or self._gathering or world.awaited:
            return
        if self._late:
            self._late, self._limits_anew, self._waits_since_ms = False, True, at_ms
            self._set_limits(0, at_ms)
        self.fencing.kill_if_parked(at_ms)
        found = self.parked_members.evaluate()
        state, lost = found.state, found.lost
        if self._must_await_snapshots(found):
            return
        ready = {record.worker.slot: record for record in self.rack.ready_spares()}
        prospect = self._staffed(found, ready)
        short = state is not None and prospect.staff is None and self.view_builder.falls_short(enough=prospect.enough)
        now = world.generation if self.hold.holds else None  # an operator who drains in a hold lets it go on
        drains = [one for one in self.rack.revocable.values() if now is None or one.asked_in != now]
        if short and any(self.rack.serves(one.slots) for one in drains):
            self.facts.add(SlotsNeeded())
            return
        self.resizing.growth.broken(world.members.values(), found.committed, at_ms)
        if self.leaving and not lost:
            self._shrink_as_asked(prospect, at_ms)
        elif self.growing and not lost and state is not None:
            self._go_on(prospect, Takeovers({}, {}), ready, at_ms)
        else:
            self._decide(prospect, ready, at_ms)

    def _staffed(self, found: DecisionInputs, ready: Mapping[SlotId, WorkerRecord]) -> DecisionInputs:
        """Add the spares that can take over now: none as long as a silent member is awaited that keeps state."""
        if obstacle := self.hold.obstacle:
            return replace(found, obstacle=obstacle, why_no_shrink=found.why_no_shrink or obstacle)
        enough, staff = len(ready) >= len(found.lost), None
        if found.state is not None and enough:
            staff = self.seating.staff(self.world.seats, found.lost, ready, self.wishes)
        return replace(found, staff=staff, enough=enough)

    def preview(self, policy: ActivePolicy, at_ms: int) -> tuple[Failure, ClusterView, Decision] | None:
        """Return what the rules of ``policy`` would decide for the failure because of which all ranks wait now, and what
        it would be decided about; None: they do not wait."""
        if self.world.phase is not Phase.PARKING or not self.waits:
            return None
        ready = {record.worker.slot: record for record in self.rack.ready_spares()}
        prospect = self._staffed(self.parked_members.evaluate(), ready)
        failure, view = self._situation(prospect, at_ms, allowed=True)
        return failure, view, choose(failure, view, policy.rules, policy.weights)

    def spare_ready(self, at_ms: int) -> None:
        """Count one spare more as ready while all ranks wait for several.

        The number of missing spares and that of starting ones both fall by one, so the wait goes on. If starts take
        longer than was known when the wait was decided, the next other event leads to a new decision.
        """
        self.parked_members.missing -= 1
        if self.parked_members.missing <= 0:
            self.decide(at_ms)

    def forget_members(self) -> None:
        """Drop what was derived from the parked members, because something new may be known about them. Spares' events
        do not need this."""
        self.parked_members.forget()

    def joining(self, at_ms: int) -> str:
        """Return, for people, the slots of spares that could become additional ranks; "": none."""
        if not self.resizing.growth.may(at_ms) or not self.resizing.room:
            return ""
        return ", ".join(record.worker.slot for record in self.resizing.joining(self.rack.ready_spares()))

    def answered(self, event: PolicyAnswered) -> None:
        """Decide with the answer of the user's policy function, if it belongs to the open question."""
        if self.decision_maker.answered(event):
            self.decide(event.at_ms)

    def overdue(self, question: int, at_ms: int) -> None:
        """Decide without the policy function's answer, if it is overdue."""
        if self.decision_maker.overdue(question):
            self.decide(at_ms)

    def _situation(self, prospect: DecisionInputs, at_ms: int, *, allowed: bool = False) -> tuple[Failure, ClusterView]:
        """Return the failure and the state of the job, as a policy receives them. ``allowed``: the provider may be asked
        once more."""
        failure = failure_of(
            self._told() or "a rollback was broken off",
            self._losses,
            prospect.lost,
            again=self._absorbing and self._progress.absorbs(prospect.committed) >= ABSORBS_MAX,
            planned=self.between_steps,
        )
        view = self.view_builder.view(
            prospect,
            moved=tuple(sorted(self._moved)),
            waited_ms=at_ms - self._waits_since_ms,
            held_ms=self.hold.held_ms(at_ms),
            absorbs=self._progress.absorbs(prospect.committed),
            provider=self.acquiring.now(at_ms, allowed=allowed),
        )
        return failure, view

    def _decide(self, prospect: DecisionInputs, ready: Mapping[SlotId, WorkerRecord], at_ms: int) -> None:
        """Ask the policy for a decision and carry it out."""
        failure, view = self._situation(prospect, at_ms)
        self.nothing_comes &= not view.comes_by_itself  # the user's function may take a while to answer
        decision = self.decision_maker.decide(failure, view, at_ms)
        if decision is None:
            return
        if decision.rung is Rung.HOLD:
            self.hold.go_on(failure.what, decision, at_ms)
        elif self.hold.end(at_ms) and decision.rung in (Rung.WAIT, Rung.ACQUIRE):
            self._set_limits(round(view.patience_used_s * 1e3), at_ms)
        stands_still = decision.rung in (Rung.WAIT, Rung.HOLD) or decision.meanwhile == "wait"
        self.waits = f"{failure.what}; {decision.reason}" if stands_still else ""
        self.nothing_comes = stands_still and not view.comes_by_itself
        asked = self.world.stopping
        if self.nothing_comes and asked is not None and not self.world.stops_for_departure:
            self.end.stop(asked.exit_code, f"{asked.because}; all ranks wait, and no step boundary comes")
            return
        match decision.rung:
            case Rung.ABSORB | Rung.SWAP | Rung.MOVE:
                assert prospect.staff is not None, "only what is possible is decided"
                self._go_on(prospect, prospect.staff, ready, at_ms)
            case Rung.WAIT | Rung.HOLD:
                self._start_spares(prospect, view)
                asked_anew = self.world.policy.function or view.provider is not None or prospect.enough
                self.parked_members.missing = 0 if asked_anew else view.short
            case Rung.RESTART:
                self._start_over(prospect, decision, failure.what)
            case Rung.STOP if prospect.state is None and self._would_begin_again(prospect, decision):
                self._start_over(prospect, decision, failure.what)  # the restart reports what prevents it
            case Rung.STOP:
                self.failed_recovery.decided(prospect, decision, failure, view)
            case Rung.SHRINK:
                self._shrink(prospect, at_ms)
            case Rung.ACQUIRE:
                self.acquiring.ask(at_ms)
                if decision.meanwhile == "train":
                    self._shrink(prospect, at_ms)
                else:
                    self._start_spares(prospect, view)

    def _set_limits(self, used_ms: int, at_ms: int) -> None:
        """Limit a wait of which ``used_ms`` are over, and which follows a hold or members that were late. The limits that
        were set when the generation was broken may be over."""
        generation = self.world.generation
        limits = (
            (RecoverOver(generation), self.config.join_timeout_ms),
            (RepairOver(generation), self.config.repair_patience_ms),
        )
        for timer, limit_ms in limits:
            if limit_ms > used_ms:
                self.out.emit(SetTimer(timer=timer, at_ms=at_ms + limit_ms - used_ms))

    def _would_begin_again(self, prospect: DecisionInputs, decision: Decision) -> bool:
        """Return whether a restart is allowed, nothing else is possible, and the policy does not oppose it."""
        wanted = decision.by != "user" and allows(self.world.policy.rules, Rung.RESTART)
        return wanted and prospect.may_begin_again and decision.is_last

    @property
    def awaits_snapshots(self) -> bool:
        """Whether all ranks wait, and no decision is possible before it is known which snapshots a condemned worker
        leaves."""
        waiting = self.world.phase is Phase.PARKING and bool(self.waits)
        return waiting and self._must_await_snapshots(self.parked_members.evaluate())

    def _must_await_snapshots(self, found: DecisionInputs) -> bool:
        return (found.state is None or found.state.rollback is not None) and self._snapshots_owed()

    def _snapshots_owed(self) -> bool:
        """Return whether a condemned worker's exit, with the snapshots that it leaves, is still to come."""
        old = self.world.old.ranks if self.world.old is not None else {}
        return self._owed and any(
            ((record.rank is not None and record.stateful) or record.worker in old) and not record.corrupt
            for record in self.rack.condemned()
        )

    def _start_over(self, prospect: DecisionInputs, decision: Decision, what: str) -> None:
        first = next((loss for _, loss in sorted(self._losses.items())), None)
        because = f"{what}; {decision.reason}"
        if prospect.state is None:
            because = self.failed_recovery.no_copy_left(what, prospect.committed)
        self.facts.add(RestartDue(because, first))

    def _go_on(
        self, prospect: DecisionInputs, staff: Takeovers, ready: Mapping[SlotId, WorkerRecord], at_ms: int
    ) -> None:
        """Let spares take over, or condemn ranks that have to move with their group first. Ready spares may join as
        well."""
        if staff.uprooted:
            self._moved.update(dict.fromkeys(staff.uprooted))
            moving = [self.world.members[rank] for rank in staff.uprooted]
            self.condemn(moving, ", ".join(dict.fromkeys(staff.uprooted.values())), at_ms, fault=False)
        elif self._may_go_on(prospect.committed):
            chosen = {rank: ready[slot] for rank, slot in staff.seats.items()}
            taken = staff.seats.values()
            may = self.resizing.growth.may(at_ms)
            free = [record for slot, record in ready.items() if slot not in taken] if may else []
            joining = self.resizing.joining(free)
            stands = prospect.state is not None and (prospect.state.rollback is None or self.world.old is not None)
            if joining and stands and self.resizing.grow(joining, prospect.committed, prospect.gate):
                slots = ", ".join(record.worker.slot for record in joining)
                verb = "joins" if len(joining) == 1 else "join"
                self._resized = f"{slots} {verb}, {self.world.size} of {self.world.full} ranks"
                self.resizing.growth.joined([record.worker for record in joining], prospect.committed)
                prospect = self._planned_anew(prospect)
            elif self.growing and not self._losses and self.world.trusted is None:
                why = "there is no state that newcomers could have" if joining else "nobody was ready any more"
                self.resizing.growth.came_to_nothing(why, at_ms)
            self._resume(prospect, chosen, at_ms)

    def _shrink_as_asked(self, prospect: DecisionInputs, at_ms: int) -> None:
        """Remove the ranks that an operator asked to remove, if the others have all state. No rank is lost."""
        if why := self.resizing.why_not_shrink(prospect.committed, prospect.gate, self.leaving):
            self.leaving = ()
            if self.world.trusted is None:  # otherwise all ranks roll back first, and the request is checked again
                self.facts.add(ShrinkImpossible(why))
            self.facts.add(SlotFreed())
        else:
            self._shrink(prospect, at_ms)

    def _shrink(self, prospect: DecisionInputs, at_ms: int) -> None:
        """Go on without the lost or leaving ranks. The remaining ranks have all of their state."""
        if not self._may_go_on(prospect.committed):
            return
        before = self.world.size
        asked, why = bool(self.leaving), "its replica has lost a rank: it will wait as a spare"
        if asked:
            why = "asked for (rackctl shrink): it will wait as a spare"
        left_over = self.resizing.shrink(prospect.committed, prospect.gate, self.leaving)
        self.resizing.growth.let_go([record.worker for record in left_over])
        self._resized = f"goes on with {self.world.size} of {before} ranks"
        if left_over:
            slots = ", ".join(record.worker.slot for record in left_over)
            self._resized += f", {slots} will wait as {'a spare' if len(left_over) == 1 else 'spares'}"
        for record in left_over:
            self.out.emit(self.rack.fence(record, why, swept_along=True))
        self._resume(self._planned_anew(prospect), {}, at_ms)

    def _planned_anew(self, prospect: DecisionInputs) -> DecisionInputs:
        """Return the prospect with the state plan for the world as it is now."""
        return replace(prospect, state=self.parked_members.state(prospect.committed))

    def _start_spares(self, prospect: DecisionInputs, view: ClusterView) -> None:
        """Start as many spares as needed, in the lost ranks' own slots first."""
        lost, free = prospect.lost, self.rack.free_slots()
        in_place = [slot for slot in lost.values() if slot in free]
        elsewhere = [slot for slot in free if slot not in in_place]
        short = len(free) if prospect.enough else len(lost) - len(self.rack.fit_spares())
        for slot in (in_place + elsewhere)[: max(short, 0)]:
            self.out.emit(self.spare_top_up.start_spare(slot))
        if view.coming < view.short and view.comes_by_itself:
            self.triage.awaits(f"{self._told()}: {len(lost)} ranks to replace")

    def _may_go_on(self, committed: Position) -> bool:
        """Count this recovery. Stop the job and return False if there were too many without progress."""
        stuck = self._progress.goes_on(committed, self._told(), absorbing=self._absorbing)
        if stuck:
            self.failed_recovery.no_progress(stuck)
        return not stuck

    # -- resume ----------------------------------------------------------------------------------------------------
    def _resume(self, prospect: DecisionInputs, chosen: dict[Rank, WorkerRecord], at_ms: int) -> None:
        told = "; ".join(filter(None, [self._told(), takeovers_text(chosen, self.rack), self._resized]))
        self._settle()
        self.stalls.forget()  # ranks may have other numbers; stalls that last are reported again
        self.planner.resume(prospect, chosen, told, at_ms)

    def resumed(self, record: WorkerRecord, event: WorkerResumed) -> None:
        """Record that a member has resumed; training begins when it was the last."""
        if record.state is not WorkerState.RESUMING:
            return
        record.move(Trigger.RESUMED)
        record.stateful = True
        record.resumed_in = event.generation
        self.stalls.entered(record)
        assert record.rank is not None, "only members are told to resume"
        if self.world.answered(record.rank):
            self.world.train()
            self.world.old = None
            self.world.trust()
            self.partition_reports.forget()
            self.facts.add(AllTrain())

    # -- nobody is lost --------------------------------------------------------------------------------------------
    def severed(self, record: WorkerRecord, event: WorkerSevered) -> None:
        """Break the generation because one of its collectives failed, although no rank is known to be lost.

        A member that is lost is found because it does not park.
        """
        running = self.world.phase in (Phase.TRAINING, Phase.RESUMING)
        if not running or record.rank is None:
            return
        self.absorb(f"a collective broke on rank {record.rank} ({event.because})", event.at_ms)

    def unbuilt(self, record: WorkerRecord, event: WorkerUnbuilt) -> None:
        """Record that a member could not build its groups. A timer finds members that report nothing."""
        if record.rank is None or record.state is not WorkerState.RESUMING:
            return
        self.partition_reports.add(record.rank, cut_off=event.cut_off)
        members = self.world.members.items()
        if all(
            other.state is not WorkerState.RESUMING or self.partition_reports.has_reported(rank)
            for rank, other in members
        ):
            self._judge_partition(event.at_ms)

    def _judge_partition(self, at_ms: int) -> None:
        """Condemn the members that are cut off, or plan again. All members live, and their groups could not be
        built."""
        assert self.world.plan is not None
        exchange = self.world.plan.store
        host = next((tray for tray, record in self.rack.trays.items() if record.store == exchange), None)
        trays = {rank: tray_of(record.worker.slot) for rank, record in self.world.members.items()}
        if blamed := self.partition_reports.blame(trays, exchange, host):
            reached = f"did not reach the exchange on {host}, which others did"
            self.condemn([self.world.members[rank] for rank in blamed], reached, at_ms)
        else:
            self.plan_again("not everybody reached everybody", at_ms)

    def absorb(self, because: str, at_ms: int) -> None:
        """Break the generation and repeat the step in place, because no rank is to blame."""
        self._absorbing = True
        self._note = because
        self._break(because, at_ms)
