"""The job as a status page shows it."""

from __future__ import annotations

import msgspec

from rackrun.core.generation.world import Phase, World
from rackrun.core.machine.job import CoreParts
from rackrun.core.members.slot_order import natural
from rackrun.core.members.workers import WorkerState
from rackrun.core.placement.snapshot_keepers import keepers_of
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, TrayId, tray_of

__all__ = ["RankView", "SpareView", "TrayView", "View", "view_of"]


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank on the status page."""

    rank: Rank
    slot: SlotId
    incarnation: Incarnation | None
    """The worker that holds the rank; None while no worker does."""
    state: str


class SpareView(msgspec.Struct, frozen=True, kw_only=True):
    """One spare on the status page."""

    slot: SlotId
    incarnation: Incarnation
    state: str


class TrayView(msgspec.Struct, frozen=True, kw_only=True):
    """One tray on the status page."""

    tray: TrayId
    host: str
    slots: int
    quarantined: tuple[SlotId, ...]
    against: dict[SlotId, str]
    """Known problems of its GPUs, by slot."""
    probation: dict[SlotId, str] = {}
    """Slots that are the last choice until an operator returns them, each with the reason."""
    withdrawn: dict[SlotId, str] = {}
    """Slots that are drained or about to be, each with the reason."""
    unjudged: str = ""
    """Which GPU checks are ignored on this tray, and why."""
    rack: str = ""
    """The serial number of its chassis."""
    clique: str = ""
    """Its NVLink clique; the first one, if the tray is divided among several."""
    keepers: tuple[TrayId, ...] = ()
    """The trays that keep copies or parity of its snapshots."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The job as a status page shows it."""

    phase: str
    elastic: bool
    generation: Generation
    world_size: int
    most: int
    """Number of ranks up to which the world grows by itself."""
    policy: str
    """The active policy, as options of the launcher."""
    restarts: int
    committed: Position
    """The last committed unit of the latest plan. The core is not informed of every step."""
    reason: str
    """The reason of the latest decision."""
    waits: str = ""
    """Why all ranks wait: the failure, and the decision to wait; "": they do not, or nothing is decided yet."""
    hold: str = ""
    """What is missing in a hold and what ends it, as notices say it, for now; "": all ranks do not wait in one."""
    ranks: tuple[RankView, ...]
    spares: tuple[SpareView, ...]
    trays: tuple[TrayView, ...]


def view_of(job: CoreParts) -> View:
    """Return the job as a status page shows it."""
    world, rack, seating = job.world, job.rack, job.seating
    racks, cliques = seating.racks(), seating.cliques()
    keepers = keepers_of(world.plan) if world.plan else {}
    return View(
        phase=world.phase.value,
        elastic=world.elastic,
        generation=world.generation,
        world_size=world.size,
        most=world.most,
        policy=str(world.policy),
        restarts=world.restarts,
        committed=world.plan.committed if world.plan else BEGIN,
        reason=world.reason,
        waits=job.recovery.waits if world.phase is Phase.PARKING else "",
        hold=job.recovery.hold.notice,
        ranks=tuple(_rank_view(world, rank, slot) for rank, slot in sorted(world.seats.items())),
        spares=tuple(
            SpareView(slot=record.worker.slot, incarnation=record.worker.incarnation, state=record.state.value)
            for record in rack.spares()
        ),
        trays=tuple(
            TrayView(
                tray=tray,
                host=rack.trays[tray].host,
                slots=rack.trays[tray].slots,
                quarantined=tuple(s for s in rack.slots_on(tray) if rack.quarantined(s)),
                against={s: why for s, why in rack.devices.against().items() if tray_of(s) == tray},
                probation={s: why for s in rack.slots_on(tray) if (why := rack.devices.probation(s))},
                withdrawn={s: why for s in rack.slots_on(tray) if (why := rack.withdrawn(s))},
                unjudged=rack.trays[tray].unjudged,
                rack=racks.get(tray, ""),
                clique=str(cliques.get(tray, "")),
                keepers=keepers.get(tray, ()),
            )
            for tray in sorted(rack.trays, key=natural)
        ),
    )


def _rank_view(world: World, rank: Rank, slot: SlotId) -> RankView:
    record = world.members.get(rank)
    if record is None:
        return RankView(rank=rank, slot=slot, incarnation=None, state="lost")
    state = "finished" if record.finished and record.state is WorkerState.TRAINING else record.state.value
    return RankView(rank=rank, slot=slot, incarnation=record.worker.incarnation, state=state)
