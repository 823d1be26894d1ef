"""Response to slow ranks: they are reported and, with ``--slow-ranks swap``, replaced one at a time at a step boundary.

`rackrun.core.stragglers.shifting` gives them less work instead.

A slot whose rank should leave because it is slow is *on probation*: its rank leaves it when a better slot is ready, as
it would leave a failing GPU (`rackrun.core.requests.planned_swap`), and it is the last choice from then on. Three
things prevent a swap, and each is reported:

- one at a time: while a rank waits to be replaced, no other is chosen;
- a rank that was replaced a short time ago and is slow again is slow wherever it runs: its work is the cause, not its
  slot;
- after some swaps in a short time no more are made until an operator has looked (``rackctl close-breaker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, HardwareChanged
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.gpu_fitness import GpuFitness, ProbationCause
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import SlowRank, SlowRanksChanged
from rackrun.protocol.ids import Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig

__all__ = ["SWAPS_MAX", "WITHIN_MS", "StragglerResponse"]

SWAPS_MAX = 3
"""Largest number of swaps within `WITHIN_MS`."""
WITHIN_MS = 3_600_000
"""Milliseconds within which at most `SWAPS_MAX` swaps are made, and none of the same rank twice."""


@dataclass(slots=True)
class StragglerResponse:
    """Reports slow ranks and chooses those to replace."""

    config: JobConfig
    devices: GpuFitness
    out: Outbox
    facts: Facts
    _slow: dict[Rank, SlowRank] = field(default_factory=dict)
    _everybody: bool = False
    _sent: dict[Rank, int] = field(default_factory=dict)
    """For each rank, when it was last chosen to leave."""
    _held: dict[Rank, str] = field(default_factory=dict)
    """Why a slow rank is not replaced; reported once."""
    _open: bool = False
    """Whether the circuit breaker is open."""

    def report(self, event: SlowRanksChanged, seats: Mapping[Rank, SlotId]) -> None:
        """Handle a report about slow ranks.

        ``seats``: the slot of each rank in the present world. An entry whose rank has moved is ignored.
        """
        if self.config.slow_ranks == "off":
            return
        slow = {one.rank: one for one in event.slow if seats.get(one.rank) == one.slot}
        self._say(slow, seats, event.everybody)
        self._slow = slow
        self._held = {rank: why for rank, why in self._held.items() if rank in slow}
        if "swap" in self.config.slow_ranks:
            self._forgive(seats)
            self._choose(seats, event.at_ms)

    def close_breaker(self, seats: Mapping[Rank, SlotId], at_ms: int) -> None:
        """Allow swaps again, because an operator has looked."""
        if self._open:
            self._open = False
            self._sent.clear()
            self._held.clear()
            self._choose(seats, at_ms)

    def _forgive(self, seats: Mapping[Rank, SlotId]) -> None:
        """End the probation of slots whose rank is no longer slow before it could leave."""
        for rank, slot in seats.items():
            slow = self.devices.on_probation(slot, ProbationCause.SLOW)
            if slow and rank not in self._slow and rank in self._sent:
                self.devices.end_probation(slot, ProbationCause.SLOW)
                del self._sent[rank]

    def _choose(self, seats: Mapping[Rank, SlotId], at_ms: int) -> None:
        """Choose the slow rank that costs most. A rank that has changed its slot since is not known to be slow."""
        waits = any(self.devices.on_probation(slot) for slot in seats.values())
        there = [one for one in self._slow.values() if seats.get(one.rank) == one.slot]
        for one in sorted(there, key=lambda one: (-one.times, one.rank)):
            if self.devices.on_probation(seats[one.rank]):
                continue
            why = self._against(one, at_ms)
            if why:
                self._hold(one.rank, why)
            elif not waits:
                waits = True
                self._sent[one.rank] = at_ms
                self.devices.put_on_probation(one.slot, ProbationCause.SLOW, f"slow: {_measured(one)}")
                self.facts.add(HardwareChanged())

    def _against(self, one: SlowRank, at_ms: int) -> str:
        """Return why a slow rank must not be replaced; "": it may be."""
        recent = [rank for rank, at in self._sent.items() if at_ms - at < WITHIN_MS]
        if one.rank in recent:
            return "it was replaced for that a short time ago: its work is slow, or what it computes, not its place"
        self._open |= len(recent) >= SWAPS_MAX
        if self._open:
            minutes = WITHIN_MS // 60_000
            return f"{SWAPS_MAX} ranks were within {minutes} minutes: nothing more is swapped until a person has looked"
        return ""

    def _hold(self, rank: Rank, why: str) -> None:
        if self._held.get(rank) != why:
            self._held[rank] = why
            self.out.emit(Notice(text=f"rank {rank} is slow, and not replaced: {why}"))

    # -- for people
    def _say(self, slow: Mapping[Rank, SlowRank], seats: Mapping[Rank, SlotId], everybody: float) -> None:
        for rank, one in slow.items():
            known = self._slow.get(rank)
            if known is None or known.slot != one.slot:
                self.out.emit(Notice(text=f"rank {rank} on {one.slot} is slow: {_measured(one)}"))
        for rank, one in self._slow.items():
            if rank not in slow and seats.get(rank) == one.slot:
                self.out.emit(Notice(text=f"rank {rank} on {one.slot} is slow no more"))
        before = _whole_trays(self._slow, seats)
        for tray, ranks in _whole_trays(slow, seats).items():
            if tray not in before:
                told = ", ".join(map(str, ranks))
                self.out.emit(
                    Notice(text=f"{tray} is slow as a whole (ranks {told}): look at the tray, not at its GPUs")
                )
        if everybody and not self._everybody:
            text = f"all ranks take {everybody:g} times as long as they once did, each on its own: nobody is to blame"
            self.out.emit(Notice(text=text))
        elif self._everybody and not everybody:
            self.out.emit(Notice(text="the ranks are about as fast again as they once were"))
        self._everybody = bool(everybody)


def _measured(one: SlowRank) -> str:
    """Describe a slow rank: ``1.5 times its peers' own time, 1.5 times its own best, in 18 of the last 20
    measurements``."""
    past = f", {one.past:g} times its own best" if one.past else ""
    return f"{one.times:g} times its peers' own time{past}, in {one.rows} of the last {one.window} measurements"


def _whole_trays(slow: Mapping[Rank, SlowRank], seats: Mapping[Rank, SlotId]) -> dict[TrayId, Sequence[Rank]]:
    """Return trays with two ranks or more that are all slow, if other trays have ranks."""
    trays: dict[TrayId, list[Rank]] = {}
    for rank, slot in seats.items():
        trays.setdefault(tray_of(slot), []).append(rank)
    if len(trays) < 2:
        return {}
    return {tray: ranks for tray, ranks in trays.items() if len(ranks) > 1 and all(rank in slow for rank in ranks)}
