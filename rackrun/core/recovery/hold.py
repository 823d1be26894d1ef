"""A hold: all ranks wait, with their state in memory, until capacity comes or an operator ends it.

It is a wait without a deadline (`rackrun.policy.Rung.HOLD`). Notices say what is missing and what would end it.

A member that becomes silent meanwhile, because its process is stopped, is not ended if state would be lost with it:
nothing waits for it. Spares take over when it runs again, or when its process has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.restore_sources import counted, named
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerState
from rackrun.protocol.commands import Notice, SetTimer
from rackrun.protocol.ids import Generation, Rank
from rackrun.protocol.policy_types import Decision, Rung
from rackrun.protocol.timers import HoldReminder

__all__ = ["REMIND_MS", "Hold"]

REMIND_MS = 600_000
"""Milliseconds between two notices about the same hold."""


@dataclass(slots=True)
class Hold:
    """Knows whether all ranks wait in a hold, and reminds operators of it."""

    world: World
    rack: RackMachine
    out: Outbox
    _what: str = ""
    """What has failed."""
    _decision: Decision | None = None
    """The latest decision to hold; None: another decision has followed."""
    _generation: Generation | None = None
    """The generation that this decision was about."""
    _said: tuple[str, str] = ("", "")
    """What has failed and what ends the hold, as the latest notice says."""
    _began_ms: int = 0
    _held_ms: int = 0
    """How long earlier holds of the same generation took."""
    _reminds_in: Generation | None = None
    """Generation whose reminder is pending. It may outlive a hold, and then serves the next one."""
    silent: dict[Rank, str] = field(default_factory=dict)
    """Silent members that are left alone because state would be lost with them, each with why it is silent."""

    @property
    def holds(self) -> bool:
        """Whether all ranks wait in a hold."""
        parked = self.world.phase is Phase.PARKING and self._generation == self.world.generation
        return parked and self._decision is not None

    def go_on(self, what: str, decision: Decision, at_ms: int) -> None:
        """Begin the hold, or go on with it after ``what`` has become another failure."""
        begins = not self.holds
        if begins:
            self._held_ms, self._began_ms = self.held_ms(at_ms), at_ms
        self._what, self._decision, self._generation = what, decision, self.world.generation
        if begins or self._said != (what, self._ends(decision)):
            self._tell(decision)
        if self._reminds_in != self.world.generation:
            self._set_reminder(at_ms)

    def end(self, at_ms: int) -> bool:
        """End the hold, because another rung was decided. Return whether there was one."""
        held, self._held_ms = self.holds, self.held_ms(at_ms)
        self._decision = None
        self.silent.clear()
        return held

    def held_ms(self, at_ms: int) -> int:
        """Return how long all ranks have waited in holds of the present generation."""
        if self._generation != self.world.generation:
            return 0
        return self._held_ms + (at_ms - self._began_ms if self.holds else 0)

    def remind(self, at_ms: int) -> None:
        """Say once more that all ranks wait in a hold, if they do."""
        self._reminds_in = None
        if self._decision is not None and self.holds:
            self._tell(self._decision)
            self._set_reminder(at_ms)

    @property
    def obstacle(self) -> str:
        """Why no spare can take over although enough may be ready; "": nothing prevents it."""
        if not self.silent:
            return ""
        ranks = sorted(self.silent)
        reasons = "; ".join(dict.fromkeys(self.silent[rank] for rank in ranks))
        be, keep = ("is", "keeps") if len(ranks) == 1 else ("are", "keep")
        return f"{named(ranks)} {be} silent ({reasons}) and {keep} the only copy of some state"

    @property
    def notice(self) -> str:
        """The notice as it would be now; "": all ranks do not wait in a hold."""
        return self._text(self._decision) if self._decision is not None and self.holds else ""

    def _set_reminder(self, at_ms: int) -> None:
        self._reminds_in = self.world.generation
        self.out.emit(SetTimer(timer=HoldReminder(self.world.generation), at_ms=at_ms + REMIND_MS))

    def _tell(self, decision: Decision) -> None:
        self._said = (self._what, self._ends(decision))
        self.out.emit(Notice(text=self._text(decision), of_hold=True))

    def _text(self, decision: Decision) -> str:
        lost, ready, starting = self._counts()
        return (
            f"all ranks wait in a hold, with their state in memory: {self._what}. {counted(lost, 'rank')} to replace; "
            f"spares: {ready} ready, {starting} starting{self.rack.held_back()}. {self._ends(decision)}."
        )

    def _ends(self, decision: Decision) -> str:
        """Return what ends the hold."""
        lost, ready, starting = self._counts()
        waits = (Rung.WAIT, Rung.HOLD, Rung.STOP)
        others = [one.rung.value for one in decision.options if one.possible and one.rung not in waits]
        ways = [f"rackctl policy swap,{rung},hold" for rung in others] + ["rackctl stop"]
        if obstacle := self.obstacle:
            again = "it runs" if len(self.silent) == 1 else "they run"
            ends = f"{obstacle[0].upper()}{obstacle[1:]}: the hold ends when {again} again and spares take over"
        elif ready < lost <= ready + starting:
            ends = f"The hold ends when {'the spare that starts is' if starting == 1 else 'those that start are'} ready"
        else:
            ends = "The hold ends when spares take over (start a tray, or rackctl return)"
        return f"{ends}, or by {' or '.join(ways)}"

    def _counts(self) -> tuple[int, int, int]:
        """Return how many ranks are lost, and how many spares are ready and start."""
        lost, ready = len(self.world.lost()), len(self.rack.ready_spares())
        return lost, ready, self.rack.starting(lost)

    def check_invariants(self) -> None:
        """Raise AssertionError if a rank is left alone that is no parked member."""
        for rank in self.silent:
            member = self.world.members.get(rank)
            parked = member is not None and member.state is WorkerState.PARKED
            assert parked or self.world.phase is Phase.STOPPED, f"rank {rank} is left alone, and has not parked"
