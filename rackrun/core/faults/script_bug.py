"""Is it the hardware, or is it the script?

The first fault is always taken for the hardware's: the rank moves on, and training goes on. The same error at the same
step on other hardware is the script's: trying again would only fail again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.members.workers import why_exited
from rackrun.protocol.events import WorkerExited
from rackrun.protocol.ids import Incarnation, Rank, Step

__all__ = ["Culprit", "fingerprint", "is_crash", "is_scripts", "remedy_for"]

CRASHES = ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV")
"""Signals that a process brings upon itself. SIGKILL comes from outside: the hardware's, or the out-of-memory killer."""
HARDWARE_FAILURES = (
    "rackrun.errors.CollectiveBroken",
    "rackrun.errors.StateLost",
    "rackrun.StartFailed",
    "torch.AcceleratorError",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
)
"""Exceptions that tell of a lost peer or device: several ranks raise them at once, without any bug in the script."""
OUT_OF_MEMORY = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
"""Once it may be another process that holds the memory of one GPU; twice it is the script's."""
MISUSES = (
    "rackrun.errors.StepError",
    "rackrun.errors.UsageError",
    "rackrun.checkpoint.base.errors.MemoryPlanError",
    "rackrun.checkpoint.base.errors.LayoutMismatch",
)
"""What rackrun itself refuses: no hardware could help."""
SEEN_MAX = 256
STATE_LOST = "rackrun.errors.StateLost"
RESTORES_MAX = 3
"""So often one rank may fail to be restored, for one and the same reason."""


def is_scripts(event: WorkerExited) -> bool:
    """An exception, or the script's own exit code."""
    if event.failure is not None and event.failure.type in HARDWARE_FAILURES:
        return False
    return event.failure is not None or why_exited(event).startswith("exit code")


def is_crash(event: WorkerExited) -> bool:
    return why_exited(event) in CRASHES


def fingerprint(event: WorkerExited) -> str:
    """Equal for the same bug on two ranks; "" for what no script does."""
    return why_exited(event) if is_scripts(event) or is_crash(event) else ""


def remedy_for(event: WorkerExited) -> str:
    """What a person can do about what ended a worker; "": its message says so itself, or nobody knows."""
    if why_exited(event) == "SIGABRT":
        return (
            "its last lines on standard error say why. gloo aborts a process when its collective has a different size on another rank: look "
            "for a collective that not every rank calls (if run.rank == 0: ...), or for tensors whose sizes differ."
        )
    if event.failure is None or event.failure.type not in OUT_OF_MEMORY:
        return ""
    return (
        "a worker that takes a rank over needs as much memory as that rank had: see what else is on its GPU (nvidia-smi), or "
        "lower the micro-batch; a smaller cache may do (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    fingerprint: str
    step: Step
    rank: Rank
    incarnation: Incarnation
    at_ms: int


@dataclass(slots=True)
class Culprit:
    """What has been seen so far in this job."""

    window_ms: int
    _seen: list[_Seen] = field(default_factory=list)
    _not_restored: dict[tuple[Rank, str], int] = field(default_factory=dict)

    def cannot_be_restored(self, event: WorkerExited, rank: Rank) -> str:
        """Why no other slot would help: what the rank is restored from is wrong in the same way each time. "": nothing shows that yet."""
        failure = event.failure
        if failure is None or failure.type != STATE_LOST:
            return ""
        times = self._not_restored[rank, failure.message] = self._not_restored.get((rank, failure.message), 0) + 1
        return f"rank {rank} could not be restored on {times} slots: {failure.message}" if times >= RESTORES_MAX else ""

    def convict(self, event: WorkerExited, rank: Rank) -> str:
        """Why this is the script's, or "" as long as it may be the hardware's. Remembers the event."""
        mark = fingerprint(event)
        if not mark:
            return ""
        if event.failure is not None and event.failure.type in MISUSES:
            where, message = event.failure.where, event.failure.message
            place = message.partition(": ")[0]  # perhaps the same, as seen from the working directory
            return (
                f"rank {rank} broke a rule, at {message if place and where.endswith(place) else f'{where}: {message}'}"
            )
        new = _Seen(mark, event.step, rank, event.incarnation, event.at_ms)
        because = next((why for old in self._seen if (why := self._same(old, new))), "")
        self._seen.append(new)
        del self._seen[:-SEEN_MAX]
        return because

    def _same(self, old: _Seen, new: _Seen) -> str:
        if old.fingerprint != new.fingerprint or old.incarnation == new.incarnation:
            return ""
        who = f"rank {old.rank} before" if old.rank == new.rank else f"rank {old.rank}"
        if old.step == new.step:
            return f"{new.fingerprint} on rank {new.rank} at step {new.step}, as on {who}: not the hardware's"
        if new.fingerprint not in CRASHES and new.at_ms - old.at_ms <= self.window_ms:
            return f"{new.fingerprint} on rank {new.rank} and on {who} within {self.window_ms} ms: not the hardware's"
        return ""
