"""The job: decides what each event means: a loss to recover from, a reason to begin again, or the end.

This module connects the others: `rackrun.core.lifecycle.forming` forms a world, `rackrun.core.lifecycle.beginning`
begins it, `rackrun.core.recovery.recovery` recovers in place (a swap), `rackrun.core.lifecycle.restart` starts all
workers anew, and `rackrun.core.lifecycle.shutdown` ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rackrun.core.faults.corruption import Corruption
from rackrun.core.faults.script_bug import MISUSES, Culprit, remedy_for
from rackrun.core.faults.start_bugs import StartBugs
from rackrun.core.faults.triage import Triage
from rackrun.core.generation.world import IN_PLACE, Phase, World
from rackrun.core.lifecycle.batch_notices import BatchNotices
from rackrun.core.lifecycle.beginning import Beginning
from rackrun.core.lifecycle.forming import Forming
from rackrun.core.lifecycle.numerics_notices import NumericsNotices
from rackrun.core.lifecycle.restart import Restart
from rackrun.core.lifecycle.shutdown import EXITS_MS, Finale, ended_well
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Loss, WorkerRecord, WorkerState
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.active_policy import Mandate
from rackrun.core.policy.ask_policy import Council
from rackrun.core.policy.measured_costs import Meter
from rackrun.core.recovery.failed_recovery import Endings
from rackrun.core.recovery.recovery import Recovery, named
from rackrun.core.recovery.view_builder import Outlook
from rackrun.core.requests.operator_requests import Control
from rackrun.core.requests.planned_swap import PlannedSwap
from rackrun.core.requests.resize_requests import Sizes
from rackrun.core.resize.acquiring import Acquiring
from rackrun.core.resize.spare_top_up import Background
from rackrun.core.stragglers.shifting import Shifting
from rackrun.core.stragglers.straggler_response import Slowness
from rackrun.protocol.commands import Command, StartWorker, StopJob
from rackrun.protocol.events import (
    DepartureAnnounced,
    Failure,
    GrowRequested,
    PolicyRequested,
    ShrinkRequested,
    SlowRanksChanged,
    StopRequested,
    TrayDescribed,
    TrayJoined,
    WorkerFinished,
    WorkerUnbuilt,
)
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import ProviderNow

__all__ = ["JobMachine"]


@dataclass(slots=True)
class JobMachine:
    """All parts of one job, and the events that concern more than one of them."""

    config: JobConfig
    rack: RackMachine
    emit: Callable[[Command], None]
    meter: Meter = field(default_factory=Meter)
    world: World = field(default_factory=World)
    seating: Seating = field(init=False)
    recovery: Recovery = field(init=False)
    control: Control = field(init=False)
    sizes: Sizes = field(init=False)
    swap: PlannedSwap = field(init=False)
    triage: Triage = field(init=False)
    slowness: Slowness = field(init=False)
    batches: BatchNotices = field(init=False)
    numerics: NumericsNotices = field(init=False)
    shifting: Shifting = field(init=False)
    corruption: Corruption = field(init=False)
    beginning: Beginning = field(init=False)
    forming: Forming = field(init=False)
    culprit: Culprit = field(init=False)
    start_bugs: StartBugs = field(init=False)
    finale: Finale = field(init=False)
    acquiring: Acquiring = field(init=False)
    background: Background = field(init=False)
    _restart: Restart = field(init=False)

    def __post_init__(self) -> None:
        self.world.policy = Mandate.of(self.config)
        self.seating = Seating(self.config, self.rack)
        outlook = Outlook(self.config, self.world, self.rack, self.seating, self.meter)
        council = Council(self.world.policy, self.emit)
        endings = Endings(self.config, self.world, self.rack, self.stop)
        self.finale = Finale(self.config, self.world, self.rack, self.emit, self.stop)
        self.recovery = Recovery(
            self.config, self.world, self.rack, self.seating, self, self.emit, outlook, council, endings
        )
        self.control = Control(
            self.config, self.world, self.rack, self.seating, self.recovery, self.emit, self._ending, self.slot_empty
        )
        self.sizes = Sizes(
            self.config, self.world, self.rack, self.recovery.resizing, self.control.admission, self.control.replies
        )
        self.swap = PlannedSwap(
            self.config,
            self.world,
            self.rack,
            self.seating,
            self.control,
            self.sizes,
            self.emit,
            self.replace,
            self.recovery.absorb,
            self.shrink,
            self.recovery.joining,
            self.grow,
        )
        self.triage = Triage(self.rack, self.emit, self.fence, self.hardware_changed)
        self.batches = BatchNotices(self.emit)
        self.numerics = NumericsNotices(self.emit)
        self.slowness = Slowness(self.config, self.rack.devices, self.emit, self.hardware_changed)
        self.shifting = Shifting(self.config, self.world, self.seating, self.emit, self._generation_ends)
        self.corruption = Corruption(
            self.config,
            self.world,
            self.rack,
            self.seating,
            self.emit,
            self._replace_liars,
            self.recovery.plan_again,
            lambda exit_code, because, remedy: self.stop(exit_code, because, remedy=remedy),
            self.hardware_changed,
        )
        self.beginning = Beginning(
            self.config,
            self.world,
            self.rack,
            self.seating,
            self.recovery,
            self.finale,
            self.shifting,
            self.emit,
            self._begin_again,
            self._look_at_swaps,
            self.trained,
            self.stop,
        )
        launch = self.beginning.launch
        self.forming = Forming(
            self.config, self.world, self.rack, self.seating, self.triage, self.emit, launch, self.stop
        )
        self._restart = Restart(
            self.config,
            self.world,
            self.rack,
            self.seating,
            outlook,
            self.emit,
            launch,
            self.triage.awaits,
            self.relent,
            self.stop,
        )
        self.culprit = Culprit(self.config.gather_ms)
        self.start_bugs = StartBugs(self.world, self.emit)
        self.acquiring = Acquiring(
            self.config, self.world, self.rack, self.emit, self.departs, self.slot_empty, self._ending
        )
        self.background = Background(self.world, self.rack, self.acquiring, self.meter, self.emit)

    # -- trays and timers ------------------------------------------------------------------------------------------
    def joined(self, event: TrayJoined) -> None:
        """Handle a tray that joined: its slots are free."""
        if self.world.phase is Phase.FORMING:
            self.forming.joined(event)
            return
        self.forming.joined_late(event)
        self.slot_empty(event.at_ms)

    def described(self, event: TrayDescribed) -> None:
        """Handle the late topology of a tray that has already joined."""
        known = self.rack.trays.get(event.tray)
        if known is None:
            return
        joined = msgspec.structs.replace(known, at_ms=event.at_ms, topology=event.topology)
        self.rack.describe(joined)
        if self.world.phase is not Phase.FORMING:
            self.forming.joined_late(joined)
            self.hardware_changed(event.at_ms)

    def timer(self, name: str, at_ms: int) -> None:
        """Pass an expired timer to the part that set it, by the first part of its name."""
        kind, _, number = name.partition(":")
        if kind in ("join", "last-call", "fit"):
            self.forming.timer(kind, at_ms)
        elif kind == "drain":
            self.finale.overdue()
        elif kind == "breaker":
            self.triage.tick(at_ms)
        elif kind == "calm" and self.world.phase is Phase.TRAINING:
            self.background.top_up(at_ms)
        elif kind == "failed":
            self.triage.overdue(number, at_ms)
        elif kind == "copies":
            self.control.timer(number)
        elif kind == "pause":
            self.swap.timer(number, at_ms)
        elif kind == "quarantine":
            if self.rack.lift_quarantine(SlotId(number)):
                self.slot_empty(at_ms)
        elif kind == "grow":
            self._look_at_swaps(at_ms)
        elif kind == "policy":
            self.recovery.overdue(number, at_ms)
        elif kind == "rack":
            self.acquiring.timer(number, at_ms)
        elif kind == "bugs" and number == str(self.world.generation):
            self._bugs_overdue(at_ms)
        elif kind == "exits" and number == str(self.world.generation):
            self._exits_overdue()
        else:
            self.recovery.timer(name, at_ms)

    # -- restart -----------------------------------------------------------------------------------------------------
    def _begin_again(self, because: str, losses: Sequence[Loss], at_ms: int) -> None:
        """Restart the world before any step was computed."""
        self._restart.early(because, losses, at_ms)

    def restart(self, because: str, loss: Loss | None, at_ms: int) -> None:
        self._restart.begin(because, loss, at_ms)

    def await_fit(self, what: str) -> None:
        self.triage.awaits(what)

    def relent(self) -> bool:
        return self.control.relent()

    def acquire(self, at_ms: int) -> None:
        self.acquiring.ask(at_ms)

    def provider(self, at_ms: int) -> ProviderNow | None:
        return self.acquiring.now(at_ms)

    def acquires(self, at_ms: int) -> bool:
        return self.acquiring.patient(at_ms)

    def _exits_overdue(self) -> None:
        """Stop the job if workers did not exit in time during a restart or at the end."""
        if self.world.phase not in (Phase.RESTARTING, Phase.ENDING):
            return
        if not self.rack.occupants and self.world.phase is Phase.RESTARTING:
            self._restart.no_slots()
            return
        left = sorted(self.rack.occupants) if self.world.phase is Phase.RESTARTING else self.finale.not_gone()
        within_ms = self.config.join_timeout_ms
        if self.world.phase is Phase.ENDING:
            within_ms = max(within_ms, EXITS_MS)
        self.stop(
            3,
            f"{', '.join(left)} did not exit within {within_ms} ms ({self.world.reason})",
            remedy="look for processes that cannot be killed (state D): a device or a file system hangs.",
        )

    # -- losses ----------------------------------------------------------------------------------------------------
    def lost(self, losses: Sequence[Loss], at_ms: int) -> None:
        """Handle workers that were lost without having been condemned. They belong together: one event reported
        them."""
        members = [loss for loss in losses if loss.record.rank is not None]
        if members:
            self._members_lost(members, at_ms)
        self.slot_empty(at_ms)

    def unbuilt(self, record: WorkerRecord, event: WorkerUnbuilt) -> None:
        if self.world.phase is not Phase.SETUP:
            self.recovery.unbuilt(record, event)
        elif event.generation == self.world.generation and record.rank is not None:
            # All ranks were there, and the others may wait for this rank in NCCL; only ending them ends that wait.
            because = f"could not build its groups ({event.because})"
            self._restart.early(f"rank {record.rank} {because}", [Loss(record=record, because=because)], event.at_ms)

    def slot_empty(self, at_ms: int) -> None:
        """A slot may be free: let whatever waits for one continue."""
        match self.world.phase:
            case Phase.FORMING:
                self.forming.look(at_ms)
            case Phase.TRAINING:
                self.background.top_up(at_ms)
            case Phase.PARKING:
                self.recovery.decide(at_ms)
            case Phase.RESTARTING:
                self._restart.look()
            case _:
                pass

    def _members_lost(self, losses: Sequence[Loss], at_ms: int) -> None:
        phase = self.world.phase
        if phase is Phase.SETUP and not self.world.elastic and all(ended_well(loss) for loss in losses):
            self.finale.plain_ended(losses)
        elif phase is Phase.SETUP:
            self._lost_before_steps(losses, at_ms)
        elif phase is Phase.ENDING:
            self.finale.ended(losses)
        elif phase in IN_PLACE and not any(self._convicted(loss) for loss in losses):
            self.recovery.lose([_told_better(loss) for loss in losses], at_ms)

    def _lost_before_steps(self, losses: Sequence[Loss], at_ms: int) -> None:
        if any(self._convicted(loss) for loss in losses if self._may_convict(loss)):
            return
        bugs = self.start_bugs
        if bugs.waits(losses, at_ms):
            for loss in losses:
                assert loss.record.rank is not None
                self.world.lose(loss.record.rank)
            return
        if bugs.alike:
            first, because = bugs.losses[min(bugs.losses)], bugs.because()
            remedy = "" if " Remedy: " in because else "see its traceback, or its output."
            self.stop(1, because, remedy=remedy, failure=first.failure, rank=first.record.rank)
            return
        losses = self._with_held(losses)
        told = named([rank for loss in losses if (rank := loss.record.rank) is not None])
        before = " before the first step" if self.world.elastic else ""
        self._restart.early(
            f"{told} lost ({_because(losses[0]) if before else losses[0].because}){before}", losses, at_ms
        )

    def _with_held(self, losses: Sequence[Loss]) -> list[Loss]:
        """Return these losses together with the earlier ones that waited for others to fail in the same way."""
        held = {rank: loss for rank, loss in self.start_bugs.losses.items() if loss not in losses}
        self.start_bugs.forget()
        return sorted([*held.values(), *losses], key=lambda loss: loss.record.rank or 0)

    def _bugs_overdue(self, at_ms: int) -> None:
        """Restart, because the other ranks have started or not failed: the script does not fail on all of them."""
        losses = [*self.start_bugs.losses.values()]
        if self.world.phase is Phase.SETUP and losses:
            self.start_bugs.forget()
            told = named([rank for loss in losses if (rank := loss.record.rank) is not None])
            self._restart.early(f"{told} lost ({_because(losses[0])}) before the first step", losses, at_ms)

    def _may_convict(self, loss: Loss) -> bool:
        """Return whether a loss may be blamed on the script. A plain script's errors lead to a restart, as under
        torchrun."""
        failure = loss.exit.failure if loss.exit else None
        return self.world.elastic or (failure is not None and failure.type in MISUSES)

    def _convicted(self, loss: Loss) -> bool:
        """Stop the job if the script is to blame for this loss, because another attempt would fail again. Return
        whether it stopped."""
        rank = loss.record.rank
        if loss.exit is None or rank is None:
            return False
        if because := self.culprit.cannot_be_restored(loss.exit, rank):
            self.stop(3, because, failure=loss.failure, rank=rank)
            return True
        because = self.culprit.convict(loss.exit, rank)
        if not because:
            return False
        if ended_well(loss):
            because = f"{because} (exited with code 0 before training was finished)"
        remedy = remedy_for(loss.exit) or "see the traceback of that rank."
        if " Remedy: " in because:  # rackrun's own errors contain their remedy
            remedy = ""
        self.stop(1, because, remedy=remedy, failure=loss.failure, rank=rank)
        return True

    # -- hardware --------------------------------------------------------------------------------------------------
    def fence(self, slots: Sequence[SlotId], because: str, at_ms: int) -> None:
        """Condemn the workers in these slots now, because of their GPUs."""
        occupants = [self.rack.occupants[slot] for slot in slots if slot in self.rack.occupants]
        self._condemn({record.worker.slot: because for record in occupants if record.alive}, at_ms)

    def replace(self, leaving: Mapping[Rank, str], at_ms: int) -> None:
        """Replace these ranks by spares while all ranks stand between two steps."""
        self.recovery.between_steps = self.swap.all_paused
        self._condemn({self.world.seats[rank]: because for rank, because in leaving.items()}, at_ms)

    def grow(self, because: str, at_ms: int) -> None:
        """Let ready spares join while all ranks stand between two steps."""
        self.recovery.growing = True
        self.recovery.between_steps = self.swap.all_paused
        self.recovery.plan_again(because, at_ms)

    def _condemn(self, because: Mapping[SlotId, str], at_ms: int) -> None:
        """Fence the workers in these slots and handle their loss."""
        if self.world.phase in (Phase.ENDING, Phase.STOPPED):
            return  # all workers end anyway
        losses = [Loss(record=self.rack.occupants[slot], because=why) for slot, why in because.items()]
        for loss in losses:
            self.recovery.fencing.fence(loss.record, loss.because)
        self.lost(losses, at_ms)

    def _replace_liars(self, records: Sequence[WorkerRecord], because: str, at_ms: int) -> None:
        """Fence workers whose state is wrong, and use nothing that they leave behind."""
        for record in records:
            record.lied = True
            self.recovery.fencing.fence(record, because, fault=True)
        self.lost([Loss(record=record, because=because) for record in records], at_ms)

    def slow_ranks(self, event: SlowRanksChanged) -> None:
        if self.world.plan is not None:
            self.slowness.heard(event, self.world.plan.generation, self.world.seats)
            self.shifting.heard(event)  # after `slowness`, which may have begun a swap

    def shares(self) -> tuple[int, ...]:
        return self.shifting.in_plan()

    def _generation_ends(self) -> bool:
        return self.swap.under_way or self.finale.stopping is not None

    def close_breaker(self, at_ms: int) -> None:
        """Act on the verdicts that the circuit breaker holds back."""
        self.triage.close_breaker(at_ms)
        if self.world.plan is not None:
            self.slowness.close_breaker(self.world.seats, at_ms)

    def hardware_changed(self, at_ms: int) -> None:
        """The health of a GPU has changed: look for free slots and pending swaps."""
        self.slot_empty(at_ms)
        self._look_at_swaps(at_ms)

    def shrink(self, leaving: Sequence[Rank], at_ms: int) -> None:
        """Go on without these ranks, while all ranks stand between two steps."""
        self.recovery.between_steps = self.swap.all_paused
        self.recovery.plan_again(f"{named(leaving)} leave (rackctl shrink)", at_ms)
        self.recovery.leaving = tuple(leaving)

    def shrink_refused(self, why: str) -> None:
        self.sizes.called_off(why)

    # -- what people ask ------------------------------------------------------------------------------------------
    def asked(self, event: ShrinkRequested | GrowRequested | PolicyRequested) -> None:
        if isinstance(event, PolicyRequested):
            self.control.change_policy(event)
        else:
            self.sizes.ask(event)
        self._look_at_swaps(event.at_ms)

    def look(self, at_ms: int) -> None:
        """Advance everything that was asked for and is not finished. Called after every event."""
        if self.acquiring.rented:
            self.acquiring.look(at_ms)
        if self.control.under_way and self.control.look(at_ms):
            self._look_at_swaps(at_ms)
        if self.sizes.under_way is not None:
            self.sizes.look()
        self.recovery.fencing.look(at_ms)

    def departs(self, event: DepartureAnnounced) -> None:
        """Handle a tray that was told to leave. If it is the last one, the job ends in order."""
        if not self.control.departs(event) and self.world.phase is not Phase.FORMING:
            because = f"{event.because}, and no other tray stays"
            stop = StopRequested(at_ms=event.at_ms, because=because, exit_code=event.exit_code)
            self.finale.departed(stop, may_drain=self.world.phase in IN_PLACE)

    def _ending(self) -> str:
        """Return why the job is ending; "": it is not."""
        if self.finale.stopping is not None:
            return self.finale.stopping.because
        return self.world.reason if self.world.phase is Phase.ENDING else ""

    # -- training --------------------------------------------------------------------------------------------------
    def trained(self, at_ms: int) -> None:
        """All ranks compute: begin what had to wait for that."""
        self.acquiring.settled()
        self.background.rest(at_ms)
        self.background.top_up(at_ms)
        self.finale.drain()
        self.finale.look(at_ms)
        self._look_at_swaps(at_ms)
        self.shifting.look()

    def retired(self, losses: Sequence[Loss], at_ms: int) -> None:
        self.finale.retired(losses, at_ms)

    def _look_at_swaps(self, at_ms: int) -> None:
        if self.finale.stopping is None:
            self.swap.look(at_ms)

    def start_spare(self, slot: SlotId) -> StartWorker:
        return self.background.start_spare(slot)

    # -- the end ---------------------------------------------------------------------------------------------------
    def finished(self, record: WorkerRecord, event: WorkerFinished) -> None:
        """Record that ``main`` has returned on a rank."""
        at_ms = event.at_ms
        if record.rank is None or record.state is WorkerState.RELEASED:
            return
        record.finished, record.returned_in_ms = True, event.took_ms
        if record.state is WorkerState.STARTING:  # its `main` returned before the first step
            self.beginning.ready(record, None, at_ms)
        elif self.world.phase is Phase.TRAINING:
            self.world.answered(record.rank)
        self.finale.look(at_ms)

    def stop_requested(self, event: StopRequested) -> None:
        self.finale.requested(event, may_drain=self.world.phase in IN_PLACE)

    def stop(
        self,
        exit_code: int,
        because: str,
        *,
        remedy: str = "",
        failure: Failure | None = None,
        rank: Rank | None = None,
    ) -> None:
        """Stop the job with an exit code and a reason."""
        world = self.world
        world.phase = Phase.STOPPED
        world.reason = because
        for held in [held for held, record in world.members.items() if not record.alive]:
            world.lose(held)
        self.emit(StopJob(exit_code=exit_code, because=because, remedy=remedy, failure=failure, rank=rank))


def _because(loss: Loss) -> str:
    return "exited with code 0 before training was finished" if ended_well(loss) else loss.because


def _told_better(loss: Loss) -> Loss:
    return Loss(record=loss.record, because=_because(loss), exit=loss.exit)
