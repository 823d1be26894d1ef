"""Response to ranks that should hold the same state and do not (``--check-replicas``).

State from after the last position known to be good is not trusted until all ranks compute again: every restore and
every rollback ends there (`rackrun.core.generation.restore_plan`). If the wrong ranks cannot be determined, no state in
memory is trusted, because a rank whose memory is wrong would compute the same again, or be the source of another. A
rank that is to blame is replaced in the same recovery if a spare is ready. Otherwise it stays, with state from its
replicas, and is replaced when a spare is ready. Its slot is on probation: the last choice from then on.

If replicas differ twice and none is outvoted, a GPU computes wrong in the same way each time. Then all their slots are
on probation, and one of the ranks is replaced. If they still differ, it was another one, which is replaced next.

One wrong bit may be a particle hit. Cases that are no accident end the job, because no rank can compute right then:

- a rank that is wrong again on another GPU is wrong because of its script or a kernel;
- a slot that is wrong repeatedly, where no other is available;
- replicas that differ twice, where no spare can help, or has not helped.

A loss that was not finite, and was finite when it was computed again (``--nan-probation``), has cost a step and nothing
else. The first time on a slot it is reported. The second time the slot is put on probation, and its rank leaves it at a
step boundary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, HardwareChanged, PlanImpossible, StateWrong
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_sources import named
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.gpu_fitness import GpuFitness, ProbationCause
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.core.placement.seating import Seating
from rackrun.core.policy.choice import allows
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import LossNotRepeated, ReplicasDiffer
from rackrun.protocol.ids import BEGIN, Generation, Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung

__all__ = ["OFFENCES_MAX", "WITHIN_MS", "Corruption", "suspect", "suspect_loss"]

OFFENCES_MAX = 3
"""Number of offences of a slot, if its rank cannot be replaced, after which the job stops. At most this many ranks are
replaced on suspicion, too."""
WITHIN_MS = 3_600_000
"""A rank that was wrong on another slot within this many milliseconds is wrong by itself."""


def suspect(event: ReplicasDiffer, devices: GpuFitness, seats: Mapping[Rank, SlotId]) -> None:
    """Put the culprits' slots on probation; if the culprits are unknown for the second time, the slots of all ranks
    that may be wrong."""
    for rank in event.culprits or event.differing:
        if rank in seats:
            devices.put_on_probation(seats[rank], ProbationCause.WRONG, _against(event, rank, seats[rank]))


def suspect_loss(event: LossNotRepeated, devices: GpuFitness) -> bool:
    """Record a loss that did not repeat; return whether the slot is on probation because of it."""
    return devices.did_not_repeat(event.slot, "its loss was not finite, and was when computed once more, twice")


@dataclass(slots=True)
class Corruption:
    """Decides what is done about replicas that differ."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    out: Outbox
    facts: Facts
    end: JobEnd
    _heard: Generation = Generation(0)
    """The generation whose report was handled. All ranks report, and the first report is used."""
    _offences: dict[SlotId, int] = field(default_factory=dict)
    _blamed: dict[tuple[int, Rank], tuple[SlotId, int]] = field(default_factory=dict)
    """For each world size and rank, the slot on which it was wrong last, and when. In a world of another size a rank
    has other work."""
    _tried: int = 0
    """Number of ranks that were replaced on suspicion."""

    def replicas_differ(self, event: ReplicasDiffer) -> None:
        """Handle a report that replicas differ. All ranks report the same."""
        world = self.world
        if event.generation == self._heard:
            return
        if world.phase not in (Phase.TRAINING, Phase.RESUMING, Phase.PARKING):
            return
        self._heard = event.generation
        world.trusted, world.unsure = event.good, not event.culprits
        if event.again and not event.culprits:
            self._differ_again(event)
            return
        blamed = {rank: world.members[rank] for rank in event.culprits if rank in world.members}
        if self._is_no_accident(event, blamed):
            return
        suspect(event, self.rack.devices, {rank: record.worker.slot for rank, record in blamed.items()})
        if self._can_be_replaced(blamed):
            self.out.emit(Notice(text=_told(event)))
            self.facts.add(StateWrong([*blamed.values()], _why(event)))
            return
        for record in blamed.values():
            record.stateful, record.wrong_in = False, event.generation
        stays = f"; no spare is ready, so {'it stays' if len(blamed) == 1 else 'they stay'} for now" if blamed else ""
        self.out.emit(Notice(text=_told(event) + stays))
        if world.phase is not Phase.PARKING:
            self.facts.add(PlanImpossible(_why(event) + (f" ({named(list(blamed))})" if blamed else "")))

    def _differ_again(self, event: ReplicasDiffer) -> None:
        there = {rank: self.world.members[rank] for rank in event.differing if rank in self.world.members}
        devices = self.rack.devices
        known = [rank for rank, one in there.items() if devices.on_probation(one.worker.slot, ProbationCause.WRONG)]
        suspect(event, devices, {rank: record.worker.slot for rank, record in there.items()})
        if len(there) < len(event.differing):
            return  # one of them is being replaced already
        goes = {rank: there[rank] for rank in sorted(known or there)[-1:]}
        self._tried += 1
        if self._tried <= OFFENCES_MAX and self._can_be_replaced(goes):
            told = f"{_twice(event)}: {named(list(there))}; {named(list(goes))} is replaced, and if they differ on, it was not that one"
            self.out.emit(Notice(text=told))
            self.facts.add(StateWrong([*goes.values()], _why(event)))
            return
        remedy = (
            "compute with deterministic kernels, on three replicas or more, or with more spares (--spares); test the GPUs; "
            "or leave --check-replicas out."
        )
        self.end.stop(3, f"{_twice(event)}, and nobody can say which are right", remedy=remedy)

    def loss_not_repeated(self, event: LossNotRepeated, rank: Rank) -> None:
        """Handle a report that a loss was not finite and was when it was computed once more."""
        what = f"rank {rank} on {event.slot}: its loss in step {event.at.step} was not finite, and was when computed once more"
        again = suspect_loss(event, self.rack.devices)
        self.out.emit(Notice(text=f"{what}; not for the first time, so the slot is on probation" if again else what))
        if again:
            self.facts.add(HardwareChanged())

    def _can_be_replaced(self, blamed: Mapping[Rank, WorkerRecord]) -> bool:
        if not blamed or not allows(self.world.policy.rules, Rung.SWAP):
            return False
        leaving: Collection[Rank] = [*self.world.lost(), *blamed]
        ready = [record.worker.slot for record in self.rack.ready_spares()]
        return self.seating.staff(self.world.seats, leaving, ready) is not None

    def _is_no_accident(self, event: ReplicasDiffer, blamed: Mapping[Rank, WorkerRecord]) -> bool:
        for rank, record in blamed.items():
            slot = record.worker.slot
            before = self._blamed.get((self.world.size, rank))
            self._blamed[self.world.size, rank] = slot, event.at_ms
            self._offences[slot] = self._offences.get(slot, 0) + 1
            if before is not None and before[0] != slot and event.at_ms - before[1] < WITHIN_MS:
                because = f"{named([rank])}: {_why(event)}, on {slot} as on {before[0]} before: it is not the GPU"
                self.end.stop(
                    1, because, remedy="update all replicas alike (see what rank it is); or leave --check-replicas out."
                )
                return True
            if self._offences[slot] >= OFFENCES_MAX and not self._can_be_replaced(blamed):
                because = f"{named([rank])}: {_why(event)}, for the {self._offences[slot]}. time on {slot}, and there is no spare"
                self.end.stop(3, because, remedy="test that GPU; hold back more spares (--spares).")
                return True
        return False


def _twice(event: ReplicasDiffer) -> str:
    return f"replicas differ in step {event.at.step}, and again when it is computed once more"


def _why(event: ReplicasDiffer) -> str:
    if event.differing:
        return f"it or its replica is wrong time and again, seen in step {event.at.step}"
    if not event.culprits:
        return f"replicas differ, seen in step {event.at.step}"
    return f"its state differs from that of its replicas, seen in step {event.at.step}"


def _against(event: ReplicasDiffer, rank: Rank, slot: SlotId) -> str:
    """Return why ``slot`` is on probation; another rank may have the slot by the time that this is read."""
    if event.differing:
        return f"rank {rank} on {slot} or its replica was wrong time and again, seen in step {event.at.step}"
    return f"rank {rank} on {slot} had another state than its replicas, seen in step {event.at.step}"


def _told(event: ReplicasDiffer) -> str:
    if event.good == BEGIN:
        back = "no earlier state is known to be good"
    else:
        back = f"good is what was there after step {event.good.step}"
    if not event.culprits:
        return f"replicas differ in step {event.at.step}, nobody can say which are right: all compute again; {back}"
    what = (
        "holds another state than its replicas" if len(event.culprits) == 1 else "hold other states than their replicas"
    )
    return f"{named(event.culprits)} {what}, seen in step {event.at.step}; {back}"
