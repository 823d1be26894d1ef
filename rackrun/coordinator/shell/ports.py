"""What the driver needs from outside. In production these are the event loop of asyncio, the journal, the agents' links
and the screen; `rackrun.chaos.simulator` has others, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.protocol.commands import BreakGeneration, Command, ResumeGeneration
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Position, Step
from rackrun.protocol.wire import FillerState, Logged, UnitCommitted

__all__ = ["AgentConnection", "Core", "JobJournal", "Loop", "LoopTimer", "NoValues", "Observer", "ValueSinks"]


class Core(Protocol):
    """The part of `rackrun.core.machine.control_plane.ControlPlane` that the driver uses."""

    def handle(self, event: Event) -> Sequence[Command]: ...

    @property
    def sent_by(self) -> Sequence[str]:
        """The rules that sent the commands of the last event that led to any, in the order of the commands."""

    def view(self) -> msgspec.Struct: ...


class LoopTimer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """The part of `asyncio.AbstractEventLoop` that the driver uses."""

    def time(self) -> float:
        """Return the seconds of a clock that is never set."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> LoopTimer: ...

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> object: ...


class JobJournal(Protocol):
    """The part of `rackrun.coordinator.journal.journal_writer.Journal` that the driver uses."""

    on_death: Callable[[str], None]

    @property
    def path(self) -> object: ...

    def persist(self, command: BreakGeneration | ResumeGeneration, at_ms: int) -> None:
        """Write ``command`` to disk before returning. Raises JournalError if that fails."""

    def event(self, event: Event) -> int: ...

    def command(self, command: Command, at_ms: int, cause: int, rule: str = "") -> None: ...

    def recovery(self, recovery: RecoveryRecord) -> None: ...

    def unit(self, unit: UnitCommitted, at_ms: float) -> None: ...

    def filler(self, told: FillerState, at_ms: float) -> None: ...

    def fact(self, key: str, value: object) -> None: ...


class AgentConnection(Protocol):
    """The link to one agent. ``send`` never blocks and keeps the order."""

    host: str
    pid: int
    """Process id of the agent on its host; 0: not reported."""

    def send(self, data: bytes) -> None: ...


class Observer(Protocol):
    """Shows people what happens in the job."""

    def line(self, text: str, logged: Logged) -> None: ...

    def recovered(self, recovery: RecoveryRecord) -> None: ...

    def protected(self, text: str) -> None:
        """Show which losses the snapshots survive from now on."""

    def notice(self, text: str) -> None:
        """Show a decision about hardware, or what became of a request."""


class ValueSinks(Protocol):
    """Where the values of ``run.log`` go, beside the observer's lines."""

    def write(self, at: Position, values: Mapping[str, float | int | str], *, began: Position | None) -> None:
        """Take the values of a unit, once and in order. ``began``: the first unit that the job has committed; None
        before that."""

    def rewind(self, step: Step) -> None:
        """Record that the values after ``step`` were wrong. They are written again."""


class NoValues:
    """`ValueSinks` of a job that writes values nowhere."""

    def write(self, at: Position, values: Mapping[str, float | int | str], *, began: Position | None) -> None:
        """Do nothing."""

    def rewind(self, step: Step) -> None:
        """Do nothing."""
