"""Racks requested from a provider, from the request until each is given back.

`rackrun.core.resize.rented_rack` has the stages. Each stage up to SERVING has a time limit. The provider's claims are
not trusted: a rack is there when its trays have joined, and useful when one of its workers is ready. A rack that does
not come in time is given up, and released when it is clear that all ranks do not wait on without it. After a failed
request the provider is not asked again in the same recovery, unless an operator changes the policy; after
`FAILURES_MAX` consecutive failures it is not asked any more. A rack that comes after it was given up is sent away,
unless all ranks wait: then it is what they wait for. Ranks leave a rack that goes by a planned swap, as they leave a
drained tray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from rackrun.core.generation.facts import Facts, SlotFreed, TrayDeparts
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord, WorkerState
from rackrun.core.policy.choice import allows, one_line
from rackrun.core.resize.rented_rack import RackStage, RentedRack
from rackrun.protocol.commands import Notice, ReleaseRack, RequestRack, SetTimer
from rackrun.protocol.events import DepartureAnnounced, RackDelivered, RackPreempted, RackRefused
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import ProviderNow, Rung
from rackrun.protocol.timers import RackStageOver

__all__ = ["FAILURES_MAX", "RackAcquisition"]

FAILURES_MAX = 3
"""Number of consecutive failed requests after which the provider is not asked any more."""
_EXIT_CODE = 143
"""Exit code of a job whose last trays are taken back: as after SIGTERM."""


@dataclass(slots=True)
class RackAcquisition:
    """Requests racks, follows each through its stages, and gives it back."""

    config: JobConfig
    world: World
    rack: RackMachine
    out: Outbox
    facts: Facts
    rented: dict[int, RentedRack] = field(default_factory=dict)
    _asked: int = 0
    _failed: int = 0
    """Number of consecutive failed requests."""
    _last: str = ""
    """Why the latest failed request failed."""
    _barred: str = ""
    """Why the provider is not asked again in this recovery."""
    _over: dict[int, RentedRack] = field(default_factory=dict)
    """Finished requests, each in the stage that it had reached."""
    withheld: dict[int, str] = field(default_factory=dict)
    """Requests that were given up and are not released as long as all ranks wait, each with the reason."""
    _looked: tuple[object, ...] = ()
    _unwanted: dict[TrayId, str] = field(default_factory=dict)
    """Trays that may still join and must leave then, each with the reason."""

    # -- for the decision ------------------------------------------------------------------------------------------
    def now(self, at_ms: int, *, allowed: bool = False) -> ProviderNow | None:
        """Return the provider's state as a policy sees it; None: there is no provider. ``allowed``: as it will be after
        `allow_requests`."""
        if not self.config.provider:
            return None
        one = self._under_way(at_ms)
        why_not = "" if allowed else self._barred
        if not why_not and self._failed >= FAILURES_MAX:
            why_not = f"{self._failed} requests in a row came to nothing (the last: {self._last})"
        return ProviderNow(
            expected_s=self.config.provider_expected_s,
            asked_s=None if one is None else (at_ms - one.asked_ms) / 1e3,
            came=one is not None and one.stage in (RackStage.JOINED, RackStage.SERVING),
            patience_s=(self.config.acquire_timeout_ms if one is None else one.until_ms - at_ms) / 1e3,
            why_not="" if one is not None else why_not,
        )

    def patient(self, at_ms: int) -> bool:
        """Return whether a request is still pending."""
        return self._under_way(at_ms) is not None

    def ask(self, at_ms: int) -> None:
        """Request a rack for the missing workers, unless a request is pending."""
        if self._under_way(at_ms) is not None:
            return
        self._release_withheld()
        self._unwanted.clear()  # the provider may give the same trays again
        missing = max(self.world.most - len(self.world.members) - len(self.rack.fit_spares()), 1)
        slots = max((joined.slots for joined in self.rack.trays.values()), default=1)
        self._asked += 1
        one = RentedRack(
            request=self._asked,
            trays=-(-missing // slots),
            asked_ms=at_ms,
            until_ms=at_ms,
            there=tuple(self.rack.trays),
            failed=self._failed,
        )
        self.rented[one.request] = one
        trays = f"{one.trays} {'tray' if one.trays == 1 else 'trays'} of {slots} {'slot' if slots == 1 else 'slots'}"
        self._say(f"{one} is asked for, with {trays}{self._expected_late()}")
        self.out.emit(RequestRack(request=one.request, trays=one.trays, slots=slots, because=self.world.reason))
        self._set_limit(one, self.config.acquire_timeout_ms, at_ms)

    def allow_requests(self) -> None:
        """Allow requests after a failed one: all train, so the next failure is a new one; or an operator has changed the
        policy."""
        self._barred = ""

    # -- what the provider says ------------------------------------------------------------------------------------
    def delivered(self, event: RackDelivered) -> None:
        """Handle the provider's report that a rack is there."""
        one = self.rented.get(event.request)
        theirs = [tray for other in self.rented.values() for tray in other.named]
        over = self._over.get(event.request)
        if one is None and self._is_wanted_late(over, RackStage.ASKED):
            one = self._take_back(over, event.at_ms)
        if one is None and event.request in self.withheld and self._is_wanted_late(over, RackStage.DELIVERED):
            one = over
        if one is None:
            self._delivered_in_vain(event, theirs)
            return
        if one.stage is not RackStage.ASKED:
            self._say(f"the provider says once more that {one} is there: that is ignored")
            return
        trays = tuple(dict.fromkeys(event.trays))
        not_new = [tray for tray in trays if tray in one.there or tray in theirs]
        if not trays or not_new:
            what = f"{', '.join(not_new)}, in the job before" if not_new else "no tray"
            self._fail(one, f"the provider says that it is {what}", event.at_ms)
        else:
            one.named = trays
            self._enter(one, RackStage.DELIVERED, self.config.rack_join_ms, event.at_ms)
            self._look_whether_joined(one, event.at_ms)
        self.facts.add(SlotFreed())

    def _delivered_in_vain(self, event: RackDelivered, theirs: Sequence[TrayId]) -> None:
        """Send away a rack that nobody wants. ``theirs``: the trays of all others."""
        over = self._over.get(event.request)
        self._say(f"rack {event.request} was delivered, and nobody wants it{', or ever did' if over is None else ''}")
        if over is not None:
            new = [tray for tray in event.trays if tray not in over.there and tray not in theirs]
            if over.stage is RackStage.ASKED:
                over.enter(RackStage.DELIVERED)
                over.named = tuple(dict.fromkeys(new))
            self._send_away(new, f"rack {event.request} comes too late", event.at_ms)
            self._tell_release(over, "it comes too late")
        else:
            self.out.emit(ReleaseRack(request=event.request, because="it comes too late"))

    def refused(self, event: RackRefused) -> None:
        """Handle a refusal, or a failure of the provider."""
        one = self.rented.get(event.request)
        because = one_line(event.because)
        if one is None:
            self._say(f"rack {event.request}, {self._why_over(event.request)}: {because}")
            if (why := self.withheld.pop(event.request, None)) is not None and event.failed:
                self._tell_release(self._over[event.request], why)
        elif one.stage in (RackStage.ASKED, RackStage.DELIVERED):
            what = "the provider failed" if event.failed else "the provider refused it"
            self._fail(one, f"{what}: {because}", event.at_ms, release=event.failed)
            self.facts.add(SlotFreed())
        else:
            self._say(f"nobody looks after {one} any more: {because}")

    def preempted(self, event: RackPreempted) -> None:
        """Let ranks leave the trays of a rack that the provider takes back."""
        one = self.rented.get(event.request)
        because = f"the provider takes it back ({one_line(event.because)})"
        if (over := self._over.get(event.request)) is not None:
            left = tuple(tray for tray in over.named if event.trays and tray not in event.trays)
            if left:  # the others are sent away if they join
                over.named = left
            else:
                over.revoked = True
                if event.request in self.withheld:
                    self._tell_release(over, because)
        if one is None or one.stage is RackStage.LEAVING:
            return
        going = [tray for tray in event.trays or one.named if tray in one.named]
        if len(going) < len(one.named) and not going:
            self._say(f"the provider takes back what {one} does not have: {', '.join(event.trays)}")
            return
        all_of_it = all(tray in going or tray in self.rack.departing for tray in one.named)
        if all_of_it and one.stage is not RackStage.SERVING:
            one.revoked = True
            self._fail(one, because, event.at_ms)
        elif all_of_it:
            self._leave(one, because, event.at_ms, even_if_last=True)
        else:
            self._send_away(going, because, event.at_ms, even_if_last=True)
        self.facts.add(SlotFreed())

    # -- what happens besides --------------------------------------------------------------------------------------
    def tray_joined(self, tray: TrayId, at_ms: int) -> None:
        """Handle a joined tray, before workers are started on it."""
        if tray in self._unwanted:
            over = next((one for one in reversed(self._over.values()) if tray in one.named), None)
            if self._is_wanted_late(over, RackStage.DELIVERED):
                self._take_back(over, at_ms)
            else:
                self._send_away((tray,), self._unwanted[tray], at_ms)
        for one in self.rented.values():
            if tray in one.named and one.stage is RackStage.DELIVERED:
                self._look_whether_joined(one, at_ms)

    def tray_lost(self, tray: TrayId, at_ms: int) -> None:
        """Handle the loss of a rented tray."""
        for one in list(self.rented.values()):
            if tray not in one.named or one.stage is RackStage.DELIVERED or self._living(one):
                continue
            if one.proved or one.stage is RackStage.LEAVING:
                self._release(one, "its trays are gone", at_ms, gone=True)
            else:
                self._fail(one, "it was lost before it was of use", at_ms)

    def stage_over(self, request: int, stage: str, at_ms: int) -> None:
        """Handle the end of a stage's time limit, if the rack is still in that stage."""
        one = self.rented.get(request)
        if one is None or self.world.phase is Phase.ENDING:
            return
        if one.stage.value == stage and at_ms >= one.until_ms:  # otherwise of the time before it was given up
            if one.stage is RackStage.ASKED:
                timeout_s = self.config.acquire_timeout_ms / 1e3
                why = f"it did not come within {timeout_s:g} s (--acquire-timeout)"
                self._fail(one, why, at_ms, release=False, withhold=True)
            elif one.stage is RackStage.DELIVERED and (joined := self._living(one)):
                self._say(f"of {one} {len(joined)} of {len(one.named)} trays have joined")
                self._enter(one, RackStage.JOINED, self.config.join_timeout_ms, at_ms)
            elif one.stage is RackStage.DELIVERED:
                join_s = self.config.rack_join_ms / 1e3
                why = f"it was delivered, and none of its trays joined within {join_s:g} s"
                self._fail(one, why, at_ms, release=False, withhold=True)
            elif one.stage is RackStage.JOINED:
                start_s = self.config.join_timeout_ms / 1e3
                self._fail(one, f"none of its workers was ready within {start_s:g} s", at_ms)
        self.facts.add(SlotFreed())

    def advance(self, at_ms: int) -> None:
        """Advance rented racks to their next stage, and give back those that are not needed. Called after every
        event."""
        if not self.rented or self.world.phase in (Phase.ENDING, Phase.STOPPED):
            return
        now = self._now()
        if now == self._looked:
            return  # nothing has changed since the last look
        self._looked = now
        for one in list(self.rented.values()):
            if one.stage in (RackStage.JOINED, RackStage.SERVING) and self._is_useless(one):
                self._failed = max(self._failed, one.failed)
                self._fail(one, f"it is of no use: {self._against(one)}", at_ms)
                self.facts.add(SlotFreed())
            elif one.stage is RackStage.JOINED and self._has_begun(one):
                one.enter(RackStage.SERVING)
            if self.world.phase is Phase.TRAINING and not one.proved and self._has_begun(one):
                one.proved = True
                self._forget_failures()
        if self.world.phase is Phase.TRAINING and self.world.size >= self.world.most and not self.world.ending():
            self._look_whether_needed(at_ms)

    def _now(self) -> tuple[object, ...]:
        """Return everything that `look` depends on. Every rank sends an event in every step, and a rack may be there
        for months."""
        world = self.world
        stages = [(one.request, one.stage, one.proved) for one in self.rented.values()]
        sizes = (world.size, world.most, world.spares)
        return (
            self.rack.edition,
            world.generation,
            world.phase,
            *sizes,
            self.world.ending(),
            world.policy.rules,
            stages,
        )

    # -- until it is given back ------------------------------------------------------------------------------------
    def own_first(self, slots: Sequence[SlotId]) -> list[SlotId]:
        """Return the slots with the job's own before those of rented racks."""
        rented = self._rented_trays()
        return sorted(slots, key=lambda slot: tray_of(slot) in rented)

    def spares_short(self) -> int:
        """Return how many more spares would let ranks leave racks that are taken back or, on the job's own trays, racks
        that could be given back."""
        if not self.rented or not allows(self.world.policy.rules, Rung.SWAP):
            return 0
        going = [record for one in self.rented.values() for record in self._members(one)]
        taken = [record for record in going if tray_of(record.worker.slot) in self.rack.departing]
        short = len(taken) - len(self.rack.fit_spares())
        if self.world.size >= self.world.most and self._own_suffices():
            serving = [len(self._members(one)) for one in self.rented.values() if one.stage is RackStage.SERVING]
            short = max(short, self._leaving() + max(serving, default=0) - self._own_spares(ready=False))
        return max(short, 0)

    def _leaving(self) -> int:
        """Return how many ranks still have to leave racks that go."""
        return sum(len(self._members(one)) for one in self.rented.values() if one.stage is RackStage.LEAVING)

    def _look_whether_needed(self, at_ms: int) -> None:
        """Give back racks that are not needed any more. All ranks have workers."""
        for one in list(self.rented.values()):
            if one.stage in (RackStage.ASKED, RackStage.DELIVERED):
                self._say(f"{one} is not needed any more: every rank has a worker")
                self._release(one, "every rank has a worker", at_ms)
            elif one.stage is not RackStage.LEAVING and self._own_suffices():
                ranks, others = len(self._members(one)), self._leaving()
                if ranks and (not allows(self.world.policy.rules, Rung.SWAP) or self._own_spares() < ranks + others):
                    continue
                self._say(f"{one} is given back: there are slots enough without it")
                self._leave(one, f"{one} is given back", at_ms)

    def _own_suffices(self) -> bool:
        """Return whether the job's own slots are enough for every rank and for as many spares as at the start."""
        rented = self._rented_trays()
        own = [slot for slot in self.rack.slots() if tray_of(slot) not in rented and self.rack.usable(slot)]
        return len(own) >= max(self.world.most, self.world.size) + self.world.spares

    def _members(self, one: RentedRack) -> list[WorkerRecord]:
        """Return the members on a rack."""
        return [record for record in self.world.members.values() if tray_of(record.worker.slot) in one.named]

    def _own_spares(self, *, ready: bool = True) -> int:
        rented = self._rented_trays()
        spares = self.rack.ready_spares() if ready else self.rack.fit_spares()
        return len([record for record in spares if tray_of(record.worker.slot) not in rented])

    def _rented_trays(self) -> set[TrayId]:
        return {tray for one in self.rented.values() for tray in one.named}

    # -- parts -----------------------------------------------------------------------------------------------------
    def _under_way(self, at_ms: int) -> RentedRack | None:
        """Return the rack that is waited for, or whose trays or workers are; None: none is."""
        for one in self.rented.values():
            if one.stage is RackStage.LEAVING or at_ms >= one.until_ms:
                continue
            if one.stage is not RackStage.SERVING or self._still_starts(one):
                return one
        return None

    def _enter(self, one: RentedRack, stage: RackStage, for_ms: int, at_ms: int) -> None:
        one.enter(stage)
        self._set_limit(one, for_ms, at_ms)

    def _set_limit(self, one: RentedRack, for_ms: int, at_ms: int) -> None:
        one.until_ms = at_ms + for_ms
        self.out.emit(SetTimer(timer=RackStageOver(one.request, one.stage.value), at_ms=one.until_ms))

    def _look_whether_joined(self, one: RentedRack, at_ms: int) -> None:
        if all(tray in self.rack.trays for tray in one.named):
            slots = sum(self.rack.trays[tray].slots for tray in one.named)
            size = "" if len(one.named) == one.trays else f"; {one.trays} trays were asked for"
            self._say(f"{one} is there: {', '.join(one.named)}, {slots} {'slot' if slots == 1 else 'slots'}{size}")
            self._enter(one, RackStage.JOINED, self.config.join_timeout_ms, at_ms)

    def _living(self, one: RentedRack) -> list[TrayId]:
        return [tray for tray in one.named if tray in self.rack.trays]

    def _slots(self, one: RentedRack) -> list[SlotId]:
        return [slot_id(tray, at) for tray in self._living(one) for at in range(self.rack.trays[tray].slots)]

    def _still_starts(self, one: RentedRack) -> bool:
        there = [self.rack.occupants.get(slot) for slot in self._slots(one) if self.rack.usable(slot)]
        return any(record is None or record.state is WorkerState.STARTING for record in there)

    def _has_begun(self, one: RentedRack) -> bool:
        there = [self.rack.occupants.get(slot) for slot in self._slots(one)]
        return any(record is not None and record.alive and record.state is not WorkerState.STARTING for record in there)

    def _is_useless(self, one: RentedRack) -> bool:
        """Return whether no worker is on the rack and none can start there. Quarantined slots are not waited for,
        because the rack costs money."""
        return not any(
            slot in self.rack.occupants
            or self.rack.usable(slot)
            or (self.rack.may_come(slot) and not self.rack.quarantined(slot))
            for slot in self._slots(one)
        )

    def _against(self, one: RentedRack) -> str:
        quarantined = [slot for slot in self._slots(one) if self.rack.quarantined(slot)]
        lost = f"its workers fail ({self.rack.last_spare_loss})" if quarantined and self.rack.last_spare_loss else ""
        return lost or "none of its slots can be used"

    def _is_wanted_late(self, over: RentedRack | None, stage: RackStage) -> TypeGuard[RentedRack]:
        """Return whether a rack that was given up in this stage, and comes now, is what all ranks wait for."""
        if over is None or over.stage is not stage or over.revoked:
            return False
        world = self.world
        parked = world.phase is Phase.PARKING and not world.awaited
        return parked and len(world.lost()) > len(self.rack.fit_spares())

    def _expected_late(self) -> str:
        """Return the part of a notice that the provider itself expects to be late; "": it does not."""
        expected_s, timeout_s = self.config.provider_expected_s, self.config.acquire_timeout_ms / 1e3
        if expected_s is None or expected_s <= timeout_s:
            return ""
        return f"; it is expected in {expected_s:g} s, and given up after {timeout_s:g} s (--acquire-timeout)"

    def _why_over(self, request: int) -> str:
        """Return why nobody follows a rack any more, as part of a notice."""
        over = self._over.get(request)
        if over is None or not over.given_up:
            return "which is not wanted any more"
        late = request in self.withheld and self.world.phase is Phase.PARKING
        return "which is late and for which all ranks still wait" if late else "which was given up"

    def _take_back(self, over: RentedRack, at_ms: int) -> RentedRack:
        """Follow a rack that was given up before it joined once more, from the stage that it had reached."""
        again = "; it was released before, and may be taken away" if over.released else ""
        self._say(f"{over} comes late, and is used all the same: all ranks wait{again}")
        del self._over[over.request]
        self.withheld.pop(over.request, None)
        for tray in over.named:
            self._unwanted.pop(tray, None)
        self.rented[over.request] = over
        self._failed -= over.counted
        over.counted, over.failed, over.given_up = False, self._failed, False
        if over.stage is RackStage.DELIVERED:
            self._set_limit(over, self.config.rack_join_ms, at_ms)
        return over

    def _fail(self, one: RentedRack, why: str, at_ms: int, *, release: bool = True, withhold: bool = False) -> None:
        """Give up a rack, and count the failure. ``withhold``: it is released later, by `release_if_not_awaited`."""
        if withhold:
            self.withheld[one.request] = why
        self._failed += 1
        one.counted = one.given_up = True
        self._last = f"{one}: {why}"
        if self.world.phase is Phase.PARKING:
            self._barred = self._last
        self._say(f"{one} came to nothing: {why}")
        self._release(one, why, at_ms, told=release)

    def release_if_not_awaited(self) -> None:
        """Release the racks that came to nothing, unless all ranks wait: then each may still come, and is used."""
        if self.world.phase is not Phase.PARKING:
            self._release_withheld()

    def _release_withheld(self) -> None:
        for request, why in list(self.withheld.items()):
            self._tell_release(self._over[request], why)

    def _tell_release(self, one: RentedRack, why: str) -> None:
        self.withheld.pop(one.request, None)
        one.released = True
        self.out.emit(ReleaseRack(request=one.request, because=why))

    def _forget_failures(self) -> None:
        self._failed = 0
        for one in self._over.values():
            one.counted = False

    def _leave(self, one: RentedRack, because: str, at_ms: int, *, even_if_last: bool = False) -> None:
        """Let ranks leave a rack; then its trays leave, and it is released."""
        one.enter(RackStage.LEAVING)
        self._send_away(one.named, because, at_ms, even_if_last=even_if_last)
        if not self._living(one):
            self._release(one, "its trays are gone", at_ms, gone=True)

    def _release(self, one: RentedRack, why: str, at_ms: int, *, told: bool = True, gone: bool = False) -> None:
        """Release a rack. ``gone``: none of its trays is left or will come."""
        del self.rented[one.request]
        self._over[one.request] = one
        if told:
            self._tell_release(one, why)
        if not gone:
            self._send_away(one.named, f"{one} is given back ({why})", at_ms)

    def _send_away(self, trays: Sequence[TrayId], because: str, at_ms: int, *, even_if_last: bool = False) -> None:
        """Let these trays leave, now or when they join. Unless ``even_if_last``, nothing is done if no other tray would
        stay, because that would end the job."""
        leaving = {**self.rack.departing, **dict.fromkeys([*trays, *self.facts.departing()])}
        if not even_if_last and all(tray in leaving for tray in self.rack.trays):
            return
        for tray in trays:
            if tray not in self.rack.trays:
                self._unwanted[tray] = because
                continue
            self._unwanted.pop(tray, None)
            event = DepartureAnnounced(at_ms=at_ms, tray=tray, because=because, exit_code=_EXIT_CODE)
            self.facts.add(TrayDeparts(event))

    def _say(self, text: str) -> None:
        self.out.emit(Notice(text=text))
