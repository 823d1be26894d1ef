"""Operators' requests to a running job: drain or return a tray or a slot, swap a rank, change the policy.

A drain has three parts. Ranks move to spares in a planned swap, so that no step is repeated. Then the spares on the
tray are ended. Then whatever the tray keeps for others is kept elsewhere. Its slots are out of use from the first
moment. A tray whose agent has been told to leave is drained in the same way, with whatever spares there are, and
dismissed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, SlotFreed
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine, RevocableDrain
from rackrun.core.placement.seating import Seating, Takeovers
from rackrun.core.placement.snapshot_keepers import SnapshotCoverage
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.core.recovery.recovery import Recovery, named
from rackrun.core.requests.admission import HELD, Admission
from rackrun.core.requests.pending_requests import (
    PendingDrain,
    PendingSwap,
    Request,
    RequestRefused,
    RequestState,
    RequestTrigger,
)
from rackrun.core.requests.policy_effect import effect_of, effect_unknown
from rackrun.core.requests.replies import Replies
from rackrun.errors import UsageError
from rackrun.protocol.commands import DismissTray, GenerationPlan, SetTimer
from rackrun.protocol.events import DepartureAnnounced, DrainRequested, PolicyRequested, ReturnRequested, SwapRequested
from rackrun.protocol.ids import Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import CopiesOver

__all__ = ["COPIES_MS", "OperatorRequests"]

COPIES_MS = 30_000
"""Milliseconds for which an empty tray is kept because of what it keeps for others."""
_AFTER_WAIT = "ask again when all train; rackctl status says what they wait for."
_BECAUSE_MAX = 500
_OVER = (Phase.ENDING, Phase.STOPPED)


@dataclass(slots=True)
class OperatorRequests:
    """Carries out drains, returns and swaps."""

    config: JobConfig
    world: World
    rack: RackMachine
    seating: Seating
    recovery: Recovery
    out: Outbox
    facts: Facts
    admission: Admission = field(init=False)
    replies: Replies = field(init=False)
    under_way: list[Request] = field(default_factory=list)
    """Requests under way, oldest first."""
    _looked: tuple[object, ...] = ()
    """What `look` depended on when it was last called."""
    _awaits: dict[Rank, None] = field(default_factory=dict)
    """Ranks for whose copies a drain waits. While they are still missing, there is nothing new."""
    _counted: tuple[object, ...] = ()
    _short: list[Request] = field(default_factory=list)
    _edition: tuple[object, ...] = ()
    _ready: tuple[SlotId, ...] = ()
    """Ready spares of this edition."""
    _stirred: tuple[object, ...] = ()
    _coverage: SnapshotCoverage | None = None

    def __post_init__(self) -> None:
        self.replies = Replies(self.rack, self.out)
        self.admission = Admission(self.config, self.world, self.rack, self.recovery, self.under_way)

    # -- what is asked
    def drain(self, event: DrainRequested) -> None:
        """Begin a drain (``rackctl drain``)."""
        try:
            self.admission.check_may(Rung.SWAP, event.steps)
            slots = self.admission.slots_of(event.target)
        except RequestRefused as refused:
            self.replies.refuse(event.request, f"drain of {event.target}", refused)
            return
        why = f"drained: {event.because[:_BECAUSE_MAX]}" if event.because else "drained"
        one = PendingDrain(event.request, event.target, slots, why, waits=event.wait)
        one.added = tuple(slot for slot in slots if slot not in self.rack.drained)
        self.rack.drain(one.added, why)
        self._add(one)
        ranks = one.ranks(self.world)
        if why := self._why_needed_by_wait(one):
            self._call_off(one, RequestRefused("spares", f"all ranks wait, and {why}", _AFTER_WAIT))
            return
        if self.world.phase is Phase.PARKING:
            self.facts.add(SlotFreed())  # other slots may have to be used
        if one in self._beyond():
            if not one.waits:
                self._call_off(one, self._too_few(ranks))
                return
            told = f"{self._too_few(ranks).what}; it waits for spares"
        elif ranks:
            told = f"{named(ranks)} will leave at the next step boundary"
        elif self.recovery.hold.holds:
            told = "no rank is there; its slots are not used, and all ranks wait on for others"
            if self._is_needed(one):
                told += (
                    "; it keeps snapshots that may be the only ones, so the drain ends when all train again "
                    "(rackctl drain --no-wait returns at once)"
                )
        else:
            told = "no rank is there"
        self.replies.begin(one, f"{one}: {told}")

    def swap(self, event: SwapRequested) -> None:
        """Begin a swap (``rackctl swap``)."""
        what = f"swap of rank {event.rank}"
        try:
            self.admission.check_may(Rung.SWAP, event.steps)
            self.admission.check_not_held(_AFTER_WAIT)
            one = self.admission.swap_of(event)
        except RequestRefused as refused:
            self.replies.refuse(event.request, what, refused)
            return
        self._add(one)
        if one.to:
            self.recovery.wishes[one.rank] = one.to
        if one in self._beyond():
            self._call_off(one, self._too_few([one.rank], may_wait=False))
        elif one.to and (staff := self._staff([one.rank], self._fit())) and staff.seats.get(one.rank) != one.to:
            what = f"{one.to} is not in the NVLink clique of rank {one.rank}'s group"
            self._call_off(one, RequestRefused("spares", what, "name a spare in it, or none."))
        else:
            to = one.to or "a spare"
            self.replies.begin(one, f"rank {one.rank} will go from {one.worker.slot} to {to} at the next step boundary")

    def give_back(self, event: ReturnRequested) -> None:
        """Return slots to use (``rackctl return``)."""
        try:
            slots = self.admission.returning(event.target)
        except RequestRefused as refused:
            self.replies.refuse(event.request, f"return of {event.target}", refused)
            return
        for one in list(self.under_way):
            if isinstance(one, PendingDrain) and not one.departing and any(slot in slots for slot in one.slots):
                self._call_off(one, RequestRefused("taken", f"{event.target} was returned", "ask again."))
        self.rack.give_back(slots)
        forgiven = tuple(slot for slot in slots if self.rack.forgive(slot))
        self.replies.say(event.request, "done", f"{event.target} may be used again", forgiven=forgiven)
        self.facts.add(SlotFreed())

    def change_policy(self, event: PolicyRequested) -> None:
        """Change the policy from the next decision on (``rackctl policy``). A decision that is being taken is taken
        again, and so is one to wait: the answer says what becomes of that wait. A policy that would end the job at once
        by it is refused."""
        policy = self.world.policy
        try:
            self.admission.check_not_over()
            if event.trouble:
                raise RequestRefused("policy", event.trouble, "name a function that can be called.")
            effect = self._effect_of(policy.changed(event.policy, event.weights, provider=self.config.provider), event)
            policy.change(event.policy, event.weights, provider=self.config.provider)
        except UsageError as error:
            self.replies.refuse(event.request, "policy", RequestRefused("policy", error.what.rstrip("."), error.remedy))
        except RequestRefused as refused:
            self.replies.refuse(event.request, "policy", refused)
        else:
            self.replies.say(event.request, "done", f"from now on: {policy}{f'; {effect}' if effect else ''}")
            self.recovery.decision_maker.forget()
            self.recovery.acquiring.allow_requests()
            self.recovery.decide(event.at_ms)

    def _effect_of(self, policy: ActivePolicy, event: PolicyRequested) -> str:
        """Return what the policy does to the present wait; "": all ranks do not wait. Raises `RequestRefused`."""
        what = event.policy if event.policy is not None else f"--weights {event.weights}"
        holds = self.recovery.hold.holds
        if self.recovery.awaits_snapshots:
            return effect_unknown(policy, what=what, holds=holds, within_s=self.config.park_timeout_ms / 1e3)
        found = self.recovery.preview(policy, event.at_ms)
        return "" if found is None else effect_of(policy, *found, what=what, holds=holds)

    def departs(self, event: DepartureAnnounced) -> bool:
        """Begin the departure of a tray. Return False if no other tray would stay."""
        if event.tray not in self.rack.trays or event.tray in self.rack.departing:
            return True
        self.rack.depart(event.tray, event.because)
        slots = self.admission.slots_of(event.tray)
        one = PendingDrain(
            f"departure:{event.tray}:{event.at_ms}", event.tray, slots, event.because, waits=True, departing=True
        )
        self._add(one)
        self.replies.begin(one, f"{event.tray} is told to leave ({event.because})")
        return any(tray not in self.rack.departing for tray in self.rack.trays)

    def tray_lost(self, tray: TrayId) -> None:
        """End the departure of a lost tray, dismissed or not. An agent that comes back under its name has not been told
        to leave."""
        for one in list(self.under_way):
            if isinstance(one, PendingDrain) and one.departing and one.target == tray:
                self._finish(one, f"{tray} has left before it was empty")

    # -- what becomes of it
    def advance(self, at_ms: int) -> bool:
        """Advance all requests; return whether a pause may be due because of it. Called after every event."""
        world, snapshots = self.world, self.recovery.snapshots
        holds = self.recovery.hold.holds
        now = (self.rack.edition, world.generation, world.phase, world.elastic, len(snapshots.told), holds)
        nothing_new = now == self._looked and self._awaits.keys() <= snapshots.behind.keys()
        if nothing_new or not self.under_way:
            return False
        self._looked = now
        self._awaits.clear()
        if world.phase not in _OVER:
            self._see_how_far(at_ms)
        return self._stirs()

    def _see_how_far(self, at_ms: int) -> None:
        for one in list(self.under_way):
            if isinstance(one, PendingSwap):
                self._look_at_swap(one)
            else:
                self._look_at_drain(one, at_ms)
        if self.world.phase is Phase.TRAINING:
            for one in list(self._beyond()):
                if not one.waits:
                    may_wait = isinstance(one, PendingDrain)
                    self._call_off(one, self._too_few(one.ranks(self.world), may_wait=may_wait))

    def _stirs(self) -> bool:
        edition = (self.rack.edition, self.world.generation, self.world.phase)
        if edition != self._edition:
            self._edition = edition
            self._ready = tuple([record.worker.slot for record in self.rack.ready_spares()])
        empty = tuple([(one.request, one.state is RequestState.EMPTY) for one in self.under_way])
        now = (self.world.generation, self.world.phase, self._ready, empty, bool(self.recovery.snapshots.told))
        stirred, self._stirred = now != self._stirred, now
        return stirred

    def asked(self, ready: Collection[SlotId]) -> dict[Rank, str]:
        """Return the ranks that should leave at the next step boundary and have a spare, with the reasons."""
        moving: dict[Rank, str] = {}
        for one in self.under_way:
            if isinstance(one, PendingSwap) and one.to and one.to not in ready:
                continue  # the named spare still starts; another one was not asked for
            wanted = dict.fromkeys(one.ranks(self.world), one.why)
            staff = self._staff([*moving, *(rank for rank in wanted if rank not in moving)], ready) if wanted else None
            if staff is not None:
                moving |= wanted | {rank: why for rank, why in staff.uprooted.items() if rank not in wanted}
        return moving

    def regroup(self) -> str:
        """Return why all ranks should pause once although none leaves: an empty tray keeps snapshots for others. "": no
        reason."""
        found = [
            one.target
            for one in self.under_way
            if isinstance(one, PendingDrain) and one.state is RequestState.EMPTY and self._is_used(one)
        ]
        return f"{', '.join(found)} is drained: snapshots are kept elsewhere from now on" if found else ""

    def call_off_drains(self) -> None:
        """Call off all drains, because the job would end without these slots."""
        asked = self._asked_in_this_hold()
        drains = [one for one in self.under_way if isinstance(one, PendingDrain) and one.added]
        drains = [one for one in drains if one.request not in asked]
        for one in [one for one in drains if self.rack.serves(one.added)] or drains:
            self._call_off(one, RequestRefused("spares", "the job needs its slots", "ask again when there are spares."))

    def _asked_in_this_hold(self) -> list[str]:
        now = self.world.generation if self.recovery.hold.holds else None
        return [request for request, one in self.rack.revocable.items() if now is not None and one.asked_in == now]

    def copies_over(self, request: str, at_ms: int) -> None:
        """Stop waiting for copies of what a drained tray keeps. A timer of an earlier time at which it was empty says
        nothing."""
        for one in self.under_way:
            if not isinstance(one, PendingDrain) or one.request != request:
                continue
            if one.state is RequestState.EMPTY and at_ms >= one.copies_until_ms:
                one.patient = False
                self._looked = ()

    # -- parts
    def _look_at_swap(self, one: PendingSwap) -> None:
        world, record = self.world, self.world.members.get(one.rank)
        if world.phase is not Phase.TRAINING:
            return
        if record is None or world.size != one.of:
            what = f"the world has {world.size} ranks since, not {one.of}, and numbers them anew"
            self._call_off(one, RequestRefused("size", what, "ask again for a rank that there is."))
        elif record.worker != one.worker:
            here, there = one.worker.slot, record.worker.slot
            went = f"went from {here} to {there}" if here != there else f"began again on {there}, after a loss"
            self._finish(one, f"rank {one.rank} {went}")
        elif one.to and not self.rack.is_fit_spare(one.to):
            self._call_off(
                one, RequestRefused("taken", f"{one.to} is not ready any more", "name another spare, or none.")
            )

    def _why_needed_by_wait(self, one: PendingDrain) -> str:
        """Return why the next decision would call the drain off, because all ranks wait, not in a hold; "": it would
        not."""
        world, holds, devices = self.world, self.recovery.hold.holds, self.rack.devices
        if holds or world.phase is not Phase.PARKING or not self.recovery.waits or not self.rack.serves(one.added):
            return ""
        enough = len(self.rack.ready_spares()) >= len(world.lost())
        if not self.recovery.view_builder.falls_short(enough=enough):
            return ""
        if any(devices.may_be_taken(slot) for slot in one.added):
            return "the job needs its slots"
        unfit = [f"{slot} ({'; '.join(devices.unfit(slot))})" for slot in one.added if devices.may_come(slot)]
        return f"the job may need what becomes fit: {', '.join(unfit)}"

    def _look_at_drain(self, one: PendingDrain, at_ms: int) -> None:
        if self.recovery.hold.holds and not one.departing and not one.ranks(self.world):
            self._clear(one)
            self._end_if_empty(one)
            return
        plain = one.departing and self.world.phase in (Phase.SETUP, Phase.FORMING) and not self.world.elastic
        if not plain and (self.world.phase is not Phase.TRAINING or one.ranks(self.world)):
            if one.state is RequestState.EMPTY:
                one.move(RequestTrigger.INTERRUPT)
            return
        self._clear(one)
        if one.state is not RequestState.EMPTY:
            one.move(RequestTrigger.VACATE)
            one.copies_until_ms = at_ms + COPIES_MS
            self.out.emit(SetTimer(timer=CopiesOver(one.request), at_ms=at_ms + COPIES_MS))
        self._end_if_empty(one, plain=plain)

    def _clear(self, one: PendingDrain) -> None:
        """End the spares in the drained slots."""
        for slot in one.slots:
            record = self.rack.occupants.get(slot)
            if record is not None and record.alive and record.rank is None and self.rack.withdrawn(slot):
                self.out.emit(self.rack.fence(record, one.why))

    def _end_if_empty(self, one: PendingDrain, *, plain: bool = False) -> None:
        """End a drain if no worker is there, and nobody needs what the tray keeps (``plain``: or nobody may)."""
        if plain or not (any(slot in self.rack.occupants for slot in one.slots) or self._is_needed(one)):
            self._finish(one, f"{one.target} is empty")
            if one.departing:
                self.out.emit(DismissTray(tray=TrayId(one.target), because=one.why))

    def _is_needed(self, one: PendingDrain) -> bool:
        """Return whether the tray may hold a rank's only copy: no other tray has received one since this tray stopped
        keeping them."""
        plan, seats = self.world.plan, self.world.seats
        if not one.patient or plan is None or one.target not in self.rack.trays:
            return False
        if self._is_used(one):
            return True
        if self.recovery.hold.holds and self.recovery.snapshots.left_on(TrayId(one.target), self.world.lost()):
            return True  # a lost rank's own snapshots, perhaps the only ones
        behind, kept = self.recovery.snapshots.behind, self._coverage_of(plan)
        needed = (rank for rank in reversed(behind) if rank in seats and kept.of_rank(rank, tray_of(seats[rank])))
        if (rank := next(needed, None)) is None:
            return False
        self._awaits[rank] = None
        return True

    def _is_used(self, one: PendingDrain) -> bool:
        plan, tray = self.world.plan, one.target
        if plan is None or tray not in self.rack.trays or not self.recovery.snapshots.told:
            return False
        if not self.rack.goes(TrayId(tray)):  # it came back with more slots, and the next plan may use it
            return False
        return tray in self._coverage_of(plan).trays

    def _coverage_of(self, plan: GenerationPlan) -> SnapshotCoverage:
        """Return what a plan's trays keep, cached for each plan because it is needed after every event."""
        if self._coverage is None or self._coverage.plan is not plan:
            self._coverage = SnapshotCoverage.of(plan)
        return self._coverage

    def _beyond(self) -> list[Request]:
        """Return the requests for which there are too few spares, including those that still start.

        A departure among them waits for spares; at the end of its grace period it is a loss like any other.
        """
        world = self.world
        now = (self.rack.edition, world.generation, world.phase, *[one.request for one in self.under_way])
        if now != self._counted:
            fit = self._fit()
            self._counted, self._short = now, []
            moving: list[Rank] = []
            for one in self.under_way:
                more = [rank for rank in one.ranks(world) if rank not in moving]
                if more and self._staff([*moving, *more], fit) is None:
                    self._short.append(one)
                else:
                    moving += more
        return self._short

    def _staff(self, ranks: Collection[Rank], spares: Collection[SlotId]) -> Takeovers | None:
        lost = [*self.world.lost(), *ranks]
        return self.seating.staff(self.world.seats, lost, spares, self.recovery.wishes)

    def _fit(self) -> list[SlotId]:
        return [record.worker.slot for record in self.rack.fit_spares()]

    def _too_few(self, ranks: list[Rank], *, may_wait: bool = True) -> RequestRefused:
        """Return the refusal because these ranks have no spares. ``may_wait``: the request can be asked to wait for
        them, as a drain can."""
        moves = f"{named(ranks)} would have to move"
        if self.recovery.hold.holds:
            return RequestRefused("taken", f"{moves}, but {HELD}", _AFTER_WAIT)
        fit, lost = self._fit(), self.world.lost()
        there = (
            f"{len(fit)} {'spare is' if len(fit) == 1 else 'spares are'} left ({', '.join(fit[:4])})"
            if fit
            else "no spare is left"
        )
        if len(fit) < len(ranks):
            why = ""
        elif self.seating.staff(self.world.seats, ranks, fit, self.recovery.wishes) is None:
            why = f" outside {'its' if len(ranks) == 1 else 'their'} NVLink clique"
        else:
            why = f" for {named(list(lost))}, lost before" if lost else " for what was asked before"
        waits = "wait for spares (--wait-for-spares)" if may_wait else "ask again when a spare is ready"
        return RequestRefused(
            "spares", f"{moves}, and {there}{why}", f"{waits}, return others (rackctl return), or add trays."
        )

    # -- the end of it
    def _call_off(self, one: Request, refused: RequestRefused) -> None:
        """End a request without doing the rest of it, and the other drains of slots that are used again."""
        if one not in self.under_way:
            return  # with another drain of its slots
        self._end(one)
        freed: tuple[SlotId, ...] = ()
        if isinstance(one, PendingDrain):
            freed = one.added
            self.rack.give_back(freed)
        self.replies.call_off(one, refused)
        for other in [*self.under_way]:
            if isinstance(other, PendingDrain) and not other.departing and any(slot in freed for slot in other.slots):
                self._call_off(other, refused)

    def _add(self, one: Request) -> None:
        self.under_way.append(one)
        if isinstance(one, PendingDrain) and one.added:
            asked_in = self.world.generation if self.recovery.hold.holds else None
            self.rack.revocable[one.request] = RevocableDrain(one.added, asked_in)
        self._looked = ()

    def _finish(self, one: Request, text: str) -> None:
        """End a request that is done."""
        self._end(one)
        self.replies.finish(one, text)

    def check_invariants(self) -> None:
        """Raise AssertionError if a request under way was not begun or has ended."""
        assert all(one.state in (RequestState.BEGUN, RequestState.EMPTY) for one in self.under_way), "not under way"

    def _end(self, one: Request) -> None:
        self.under_way.remove(one)
        self.rack.revocable.pop(one.request, None)
        self._looked = ()
        if isinstance(one, PendingSwap):
            self.recovery.wishes.pop(one.rank, None)
