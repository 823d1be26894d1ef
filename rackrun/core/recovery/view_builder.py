"""Construction of the policy's input from what the core knows: the failure and its likely cause, and the state of the
job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rackrun.core.faults.script_bug import fingerprint
from rackrun.core.generation.restore_plan import StatePlan
from rackrun.core.generation.restore_sources import counted
from rackrun.core.generation.world import World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Loss, WorkerRecord, WorkerState, why_exited
from rackrun.core.placement.seating import Seating, Takeovers
from rackrun.core.policy.measured_costs import CostMeter
from rackrun.protocol.ids import Position, Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import ClusterView, Failure, FailureCause, ProviderNow, RankNow, SpareNow, TrayNow

__all__ = ["ViewBuilder", "DecisionInputs", "failure_of", "cause_of"]

_NETWORK = (
    "rackrun.errors.CollectiveBroken",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "builtins.ConnectionError",
    "builtins.ConnectionResetError",
    "builtins.BrokenPipeError",
)
_STORAGE = ("builtins.OSError", "builtins.FileNotFoundError", "builtins.PermissionError", "rackrun.errors.StateLost")
"""Errors that are attributed to storage. An OSError means a full disk or a lost file system; a script's own OSError
counts as this too, until it repeats."""


def cause_of(loss: Loss) -> FailureCause:
    """Return what a first failure is attributed to. `rackrun.core.faults.script_bug` recognizes the script's own errors
    when they repeat."""
    if loss.exit is None:
        return FailureCause.HARDWARE
    if loss.failure is not None:
        kind = loss.failure.type
        return (
            FailureCause.NETWORK
            if kind in _NETWORK
            else FailureCause.STORAGE
            if kind in _STORAGE
            else FailureCause.HARDWARE
        )
    if why_exited(loss.exit) == "SIGTERM" and not fingerprint(loss.exit):
        return FailureCause.PREEMPTION
    return FailureCause.HARDWARE


def failure_of(
    what: str, losses: Mapping[Rank, Loss], lost: Mapping[Rank, SlotId], *, again: bool, planned: bool
) -> Failure:
    """Describe everything that went wrong since the last plan as one failure.

    ``lost`` holds all ranks without a worker, also those lost before an older plan. ``again``: the same step has failed
    in place repeatedly, so the hardware is not to blame.
    """
    found = [cause_of(loss) for _, loss in sorted(losses.items())]
    if again:
        taken_for = FailureCause.USER
    elif not lost:
        taken_for = FailureCause.NETWORK
    else:
        taken_for = found[0] if found and len(dict.fromkeys(found)) == 1 else FailureCause.HARDWARE
    return Failure(
        what=what,
        whose=taken_for,
        ranks=tuple(sorted(lost)),
        slots=tuple(slot for _, slot in sorted(lost.items())),
        evidence=tuple(
            f"rank {rank} on {loss.record.worker.slot}: {loss.because}" for rank, loss in sorted(losses.items())
        ),
        planned=planned,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """What is known when a decision is taken, from fresh reports."""

    committed: Position
    gate: tuple[float, ...]
    state: StatePlan | None
    """Where each rank's state comes from; None: no copy of some state is left in memory."""
    lost: Mapping[Rank, SlotId]
    ranks: tuple[RankNow, ...]
    exact: bool
    staff: Takeovers | None = None
    """The spares that can take over now; None: the lost ranks cannot be taken over now."""
    enough: bool = False
    """Whether as many spares are ready as ranks are lost. If so and ``staff`` is None, none is inside the NVLink
    clique."""
    may_begin_again: bool
    why_no_shrink: str = "the world is not where it could"
    """Why the others cannot go on without the lost ranks; "": they can."""
    would_stay: int = 0
    """How many ranks would go on."""
    obstacle: str = ""
    """Why no spare can take over, however many are ready; "": it depends on the spares."""


@dataclass(slots=True)
class ViewBuilder:
    """Builds the `ClusterView` that a policy receives."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    cost_meter: CostMeter
    _told: tuple[int, int, tuple[SlotId, ...]] | None = None
    """What ``_trays_now`` was made from."""
    _trays_now: tuple[TrayNow, ...] = ()

    def view(
        self,
        prospect: DecisionInputs,
        *,
        moved: tuple[Rank, ...],
        waited_ms: int,
        held_ms: int = 0,
        absorbs: int,
        provider: ProviderNow | None = None,
    ) -> ClusterView:
        """Return the job as a policy sees it.

        ``moved``: ranks that were alive and left their slots because their group moves.
        """
        world, rack, config = self.world, self.rack, self.config
        lost, state, staff = prospect.lost, prospect.state, prospect.staff
        short = self._short(len(prospect.lost), enough=prospect.enough)
        coming, unusable = rack.coming(), rack.unusable()
        back = None
        if state is not None:
            back = 0 if state.rollback is None else max(prospect.committed.step - state.rollback, 0)
        return ClusterView(
            world_size=world.size,
            generation=world.generation,
            step=prospect.committed.step,
            mesh=self.seating.mesh.axes if self.seating.mesh else (),
            trays=self._trays(unusable),
            ranks=prospect.ranks,
            spares=self._spares(),
            usable_slots=len(rack.slots()) - len(unusable if state is not None else rack.hopeless(unusable)),
            takeovers={rank: staff.seats[rank] for rank in lost} if staff else {},
            uprooted={rank: staff.seats[rank] for rank in staff.uprooted} if staff else {},
            moved=moved,
            short=short if staff is None else 0,
            coming=coming,
            hoped=self._hoped(),
            returning_slots=sum(rack.returning.values()),
            why_short=self._why_short(prospect, coming) if staff is None and state is not None else "",
            obstacle=prospect.obstacle,
            rollback_steps=back,
            may_begin_again=prospect.may_begin_again,
            shrink_to=0 if prospect.why_no_shrink or not lost else prospect.would_stay,
            why_no_shrink=prospect.why_no_shrink,
            exact=prospect.exact,
            placeable=self._placeable(prospect),
            restarts_left=max(config.max_restarts - world.restarts, 0),
            waited_s=waited_ms / 1e3,
            held_s=held_ms / 1e3,
            start_patience_s=config.join_timeout_ms / 1e3,
            repair_patience_s=config.repair_patience_ms / 1e3,
            absorbs=absorbs,
            provider=provider,
            recoveries=self.cost_meter.recoveries,
            costs=self.cost_meter.costs(prospect.committed.step, None if world.trusted is None else world.trusted.step),
        )

    def ranks(self) -> tuple[RankNow, ...]:
        """Return all ranks with their slots, and whether each is alive."""
        seats, members = self.world.seats, self.world.members
        return tuple([RankNow(rank=rank, slot=seats[rank], alive=rank in members) for rank in self.world.ranks()])

    def exact(self) -> bool:
        """Return whether all members' results are independent of the number of ranks."""
        return all(record.exact for record in self.world.members.values())

    def falls_short(self, *, enough: bool) -> bool:
        """Return whether there are too few spares, even with all that are starting and all that could be started."""
        return self.rack.coming() < self._short(len(self.world.lost()), enough=enough)

    def _short(self, lost: int, *, enough: bool) -> int:
        return 1 if enough else lost - len(self.rack.ready_spares())

    def _hoped(self) -> int:
        unusable = self.rack.unusable()
        unfit = len([slot for slot in unusable if self.world.rank_at(slot) is None and self.rack.may_come(slot)])
        return unfit + sum(self.rack.returning.values())

    def _why_short(self, prospect: DecisionInputs, coming: int) -> str:
        lost = self.world.lost()
        to_replace = f"{counted(len(lost), 'rank')} to replace"
        if prospect.obstacle:
            return f"{to_replace}, and {prospect.obstacle}"
        if prospect.enough:
            return f"{to_replace}, and no spare inside their NVLink clique"
        last = f"; the last spare was lost too: {self.rack.last_spare_loss}" if self.rack.last_spare_loss else ""
        ready, starting = len(self.rack.ready_spares()), self.rack.starting(len(lost))
        spares = f"{counted(ready, 'spare')} ready, {starting} starting" if starting else counted(ready, "spare")
        more = "" if ready + coming >= len(lost) else ", no free slot left"
        return f"{to_replace}, {spares}{more}{last}{self.rack.held_back()}"

    def _placeable(self, prospect: DecisionInputs) -> bool:
        """Return whether a restart finds a slot for every rank.

        It is computed only where a restart may be chosen although state is left, so that it does not end what could
        have gone on.
        """
        config = self.config
        policy = self.world.policy
        takeable = prospect.staff is None or policy.rules.order or policy.rules.never or policy.function
        if prospect.state is None or not config.start_over or not takeable:
            return True
        return self.seating.again(self.world.seats) is not None

    def _trays(self, unusable: Sequence[SlotId]) -> tuple[TrayNow, ...]:
        """Return the trays as a policy sees them, cached: each new spare leads to a new decision, and trays rarely
        change."""
        told = (self.rack.trays_edition, self.seating.edition, tuple(unusable))
        if told != self._told:
            self._told, self._trays_now = told, self._look_at_trays(unusable)
        return self._trays_now

    def _look_at_trays(self, unusable: Sequence[SlotId]) -> tuple[TrayNow, ...]:
        rack, cliques = self.rack, self.seating.cliques()
        against: dict[TrayId, list[SlotId]] = {}
        for slot in unusable:
            against.setdefault(tray_of(slot), []).append(slot)
        return tuple(
            [
                TrayNow(
                    tray=tray,
                    host=rack.trays[tray].host,
                    slots=rack.trays[tray].slots,
                    clique=str(cliques.get(tray, "")),
                    unusable=tuple(against.get(tray, ())),
                )
                for tray in rack.order()
            ]
        )

    def _spares(self) -> tuple[SpareNow, ...]:
        ready = {record.worker.slot for record in self.rack.ready_spares()}
        return tuple([SpareNow(slot=one.worker.slot, state=_state(one, ready)) for one in self.rack.spares()])


def _state(spare: WorkerRecord, ready: Collection[SlotId]) -> Literal["ready", "starting", "unfit"]:
    if spare.state is WorkerState.STARTING:
        return "starting"
    return "ready" if spare.worker.slot in ready else "unfit"
