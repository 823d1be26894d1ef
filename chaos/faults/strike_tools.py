"""What a fault needs in order to strike a real job, as Protocols: the tools of one strike, and what a machine can do.

`rackrun.chaos.injectors` implements both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from rackrun.chaos.faults.fault_types import BaseFault, Complaint

__all__ = ["CutShape", "GpuReport", "Injected", "Machine", "StrikeOutcome", "StrikeTools"]


class StrikeOutcome(NamedTuple):
    """Whether a strike took effect, and the detail that shows it."""

    took: bool
    detail: str
    struck_s: float | None = None
    """When it struck, by the host's monotonic clock, if the injector knows. Finding the subjects takes time, too."""


class Injected(Protocol):
    """A strike that has begun."""

    def outcome(self) -> StrikeOutcome | None:
        """Return the outcome, or None while it is not known whether the strike has taken effect."""

    def take_back(self) -> None:
        """Undo the fault. Called only for faults that last."""


class GpuReport(NamedTuple):
    """What the driver of a GPU reports."""

    what: str
    """The error's name for people."""
    says: Mapping[str, int | dict[str, int]]
    """What the driver answers to queries about the GPU while the fault is in force; empty: nothing unusual."""
    xid: int | None = None
    """The Xid error that the driver reports once."""


class CutShape(Protocol):
    """How the network of some trays is cut."""

    @property
    def shape(self) -> str:
        """``isolated``, ``one_way``, ``from_coordinator`` or ``from_peers``."""

    @property
    def loud(self) -> bool:
        """Whether connections are refused instead of falling silent."""


class Machine(Protocol):
    """What this machine can do. Each complaint is None, or the reason and a remedy."""

    def without_driver(self) -> Complaint | None:
        """Return why there can be no fake GPU driver."""

    def without_hosts(self) -> Complaint | None:
        """Return why trays cannot be on hosts of their own."""

    def has_private_files(self) -> bool:
        """Whether a file system can be mounted for the job alone."""

    def can_limit_memory(self) -> bool:
        """Whether a memory limit can be set for a process of the job."""

    def clock_problem(self) -> str:
        """Return why the wall clocks of single processes cannot be moved, or "" if they can."""

    def how_slowed(self) -> str:
        """Return how processes are slowed down here."""


class StrikeTools(Protocol):
    """The tools of one strike; they act on its subjects.

    Each begins something at once and returns its handle. Each raises `rackrun.chaos.injectors.common.injection.Missed`
    when there is nothing to strike, and ``OSError`` when the machine refuses.
    """

    def send_signal(self, name: str) -> Injected:
        """Send the processes a signal that ends them: ``KILL``."""

    def stop(self) -> Injected:
        """Stop the processes until the fault is taken back."""

    def ask_to_leave(self, notice_s: float) -> Injected:
        """Send each agent SIGTERM, and SIGKILL to its tray's processes after ``notice_s`` seconds."""

    def throttle(self, share: float) -> Injected:
        """Give the processes only a share of a processor."""

    def limit_descriptors(self) -> Injected:
        """Let the processes open nothing more, until the fault is taken back."""

    def order(self, fault: BaseFault) -> Injected:
        """Have each process carry out the fault from inside, as its row's ``inside`` says."""

    def order_under_memory_limit(self, fault: BaseFault) -> Injected:
        """Order the fault in each process, in a memory cgroup of its own."""

    def order_for_storage(self, fault: BaseFault) -> Injected:
        """Order the fault in whatever process makes a file call of checkpoints."""

    def start_agents(self) -> Injected:
        """Start an agent for each tray, which must have none."""

    def start_duplicates(self) -> Injected:
        """Start a second process beside each agent or coordinator."""

    def report_gpu(self, report: GpuReport) -> Injected:
        """Let the driver of each subject's GPU report an error."""

    def cut_network(self, cut: CutShape) -> Injected:
        """Cut the network between the subjects' trays and the others."""

    def lose_packets(self, share: float) -> Injected:
        """Lose this share of the packets between the trays and the coordinator."""

    def spoil_links(self, fault: BaseFault) -> Injected:
        """Change bytes and connections between the agents and the coordinator, by the proxy between them."""

    def both(self, *parts: Injected) -> Injected:
        """Combine several strikes into one. It has taken effect when all of them have, and is taken back by taking back
        each of them."""

    def fill_disk(self) -> Injected:
        """Leave no room in the file system of the checkpoints."""

    def flip_in_checkpoint(self) -> Injected:
        """Flip a bit in a file of the newest checkpoint."""

    def flip_in_snapshot(self) -> Injected:
        """Flip a bit in the newest snapshot of each rank."""

    def move_clocks(self, by_s: float) -> Injected:
        """Move the processes' wall clocks."""
