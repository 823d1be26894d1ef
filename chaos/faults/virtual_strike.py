"""What a fault needs in order to strike a job in virtual time, as Protocols. `rackrun.chaos.simulator` implements them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rackrun.chaos.faults.targets import Subject
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import SlotId, TrayId

__all__ = ["CallFault", "VirtualAgent", "VirtualStrike", "VirtualWorker"]


class CallFault(NamedTuple):
    """A file call on checkpoint storage that does not do what it should: ``slow``, ``torn``, or an error's name."""

    call: str
    error: str
    slow_s: float = 0.0


class VirtualWorker(Protocol):
    """A worker of a simulated job."""

    slot: SlotId
    slow: float
    """How many times slower than usual it is."""

    @property
    def passed(self) -> int:
        """The last unit whose gate it has passed."""

    def end(self, *, signal: int | None = None, code: int | None = None, bug: str = "") -> None:
        """End it. ``bug``: the place and the kind of the exception that ended it."""

    def pause(self) -> None:
        """Stop it."""

    def go_on(self) -> None:
        """Wake it up."""


class VirtualAgent(Protocol):
    """An agent of a simulated job, with its tray's workers."""

    tray: TrayId

    def die(self, *, told: bool = True) -> None:
        """End it with all its workers. ``told``: its connection ends visibly, and does not just fall silent."""

    def pause(self) -> None:
        """Stop the agent; its workers go on."""

    def go_on(self) -> None:
        """Wake it up."""

    def processes(self) -> Sequence[VirtualWorker]:
        """Return its workers that are alive."""


class VirtualStrike(Protocol):
    """One strike of a fault at one subject."""

    number: int
    """The number of the strike in its plan."""
    subject: Subject

    def each(
        self,
        *,
        worker: Callable[[VirtualWorker], object] | None = None,
        agent: Callable[[VirtualAgent], object] | None = None,
    ) -> bool:
        """Call ``worker`` for a rank or spare, ``agent`` for each agent of anything larger.

        Returns False if there is nobody, or if ``worker`` returns False because the worker cannot be struck now.
        """

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call ``do`` after ``seconds``."""

    def on_heal(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the fault is taken back."""

    def chance(self, share: float) -> bool:
        """Return True in this share of all cases, drawn at random."""

    def stop_coordinator(self) -> bool:
        """Stop the coordinator until the fault is taken back. Returns False if it is stopped already."""

    def crash_at(self, point: str, nth: int, who: VirtualWorker | VirtualAgent) -> None:
        """End ``who`` when it comes to ``point`` for the ``nth`` time from now on."""

    def switch_on(self) -> bool:
        """Start the agent of the tray if it is down. Returns False if there is no such tray."""

    def ask_to_leave(self, agent: VirtualAgent) -> None:
        """Ask an agent to leave, as SIGTERM does."""

    def delay(self, seconds: float) -> None:
        """Let the worker enter its next collective later."""

    def poison(self, unit: int) -> None:
        """Let a sample of ``unit`` raise wherever it is computed."""

    def flip(self, *, in_gradients: bool) -> bool:
        """Corrupt the worker's state, or its gradients. Returns False if it has none that counts."""

    def damage_snapshot(self) -> bool:
        """Damage the worker's newest snapshot. Returns False if there is none."""

    def damage_checkpoint(self) -> bool:
        """Damage the newest checkpoint. Returns False if there is none."""

    def fail_calls(self, fault: CallFault) -> None:
        """Let a file call on checkpoint storage fail until the fault is taken back."""

    def judge_gpu(self, slot: SlotId, health: Health, what: str) -> None:
        """Let the agent report a verdict about the GPU of ``slot``."""

    def cut(self, tray: TrayId, *, up: bool, down: bool, peers: bool, loud: bool) -> None:
        """Cut a tray off until the fault is taken back: from what it sends to the coordinator (``up``), from what is
        sent to it (``down``), from its peers. ``loud``: connections break at once."""

    def slow_link(self, tray: TrayId, *, latency_s: float, jitter_s: float) -> None:
        """Delay the messages of a tray until the fault is taken back."""

    def break_link(self, tray: TrayId, *, half_open: bool) -> None:
        """Break the connection of a tray. Otherwise than with ``half_open``, where the agent does not notice, new ones
        break too until the fault is taken back."""
