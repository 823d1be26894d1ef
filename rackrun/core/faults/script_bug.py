"""Whether a failure is the hardware's or the script's.

The first failure always counts as the hardware's: the rank moves to another slot, and training goes on. The same error
at the same step on other hardware is the script's, and another attempt would fail again. The same
holds when several replacements in a row fail alike in their first step, even if its number differs because the others
have committed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.members.workers import why_exited
from rackrun.protocol.events import WorkerExited
from rackrun.protocol.ids import Incarnation, Rank, Step, at_step

__all__ = ["ScriptBugs", "fingerprint", "is_crash", "is_scripts", "remedy_for"]

CRASHES = ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV")
"""Signals that a process causes by its own actions. SIGKILL comes from outside: from the hardware, or from the
out-of-memory killer."""
HARDWARE_FAILURES = (
    "rackrun.errors.CollectiveBroken",
    "rackrun.errors.StateLost",
    "rackrun.StartFailed",
    "torch.AcceleratorError",
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
)
"""Exceptions that report a lost peer or device. Several ranks may raise them at once without a bug in the script."""
OUT_OF_MEMORY = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")
"""Once, another process may hold the memory of a GPU; the second time it is the script's fault."""
MISUSES = (
    "rackrun.errors.StepError",
    "rackrun.errors.UsageError",
    "rackrun.errors.DirectoryRefused",
    "rackrun.checkpoint.base.errors.MemoryPlanError",
    "rackrun.checkpoint.base.errors.LayoutMismatch",
)
"""Errors with which rackrun refuses what the script does. No other hardware could help."""
SEEN_MAX = 256
STATE_LOST = "rackrun.errors.StateLost"
RESTORES_MAX = 3
"""How often one rank may fail to be restored for the same reason."""
FIRST_STEPS_MAX = 3
"""How many replacements may fail alike in their first step."""


def is_scripts(event: WorkerExited) -> bool:
    """Return whether a worker ended by an exception or by the script's own exit code."""
    if event.failure is not None and event.failure.type in HARDWARE_FAILURES:
        return False
    return event.failure is not None or why_exited(event).startswith("exit code")


def is_crash(event: WorkerExited) -> bool:
    """Return whether a worker ended by one of the signals in `CRASHES`."""
    return why_exited(event) in CRASHES


def fingerprint(event: WorkerExited) -> str:
    """Return a text that is equal for the same bug on two ranks; "" for an exit that no script causes."""
    return why_exited(event) if is_scripts(event) or is_crash(event) else ""


def remedy_for(event: WorkerExited) -> str:
    """Return what an operator can do about a worker's exit; "": its message says so itself, or no remedy is known."""
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
    in_first_step: bool
    """Whether a replacement failed in the first step that it took part in."""


@dataclass(slots=True)
class ScriptBugs:
    """Remembers the failures of this job and recognizes those of the script."""

    window_ms: int
    _seen: list[_Seen] = field(default_factory=list)
    _not_restored: dict[tuple[Rank, str], int] = field(default_factory=dict)

    def cannot_be_restored(self, event: WorkerExited, rank: Rank) -> str:
        """Return why no other slot would help: the rank's sources were wrong in the same way each time. "": not shown
        yet."""
        failure = event.failure
        if failure is None or failure.type != STATE_LOST:
            return ""
        times = self._not_restored[rank, failure.message] = self._not_restored.get((rank, failure.message), 0) + 1
        return f"rank {rank} could not be restored on {times} slots: {failure.message}" if times >= RESTORES_MAX else ""

    def convict(self, event: WorkerExited, rank: Rank, *, in_first_step: bool = False) -> str:
        """Record a failure. Return why it is the script's; "" as long as it may be the hardware's.

        ``in_first_step``: whether a replacement failed in the first step that it took part in.
        """
        mark = fingerprint(event)
        if not mark:
            return ""
        if event.failure is not None and event.failure.type == "rackrun.errors.DirectoryRefused":
            return event.failure.message
        if event.failure is not None and event.failure.type in MISUSES:
            where, message = event.failure.where, event.failure.message
            place = message.partition(": ")[0]  # may be the same place, relative to the working directory
            return (
                f"rank {rank} broke a rule, at {message if place and where.endswith(place) else f'{where}: {message}'}"
            )
        new = _Seen(mark, event.step, rank, event.incarnation, event.at_ms, in_first_step)
        because = next((why for old in self._seen if (why := self._same(old, new))), "")
        self._seen.append(new)
        del self._seen[:-SEEN_MAX]
        return because or self._first_steps(new)

    def _first_steps(self, new: _Seen) -> str:
        """Return that too many replacements have failed in the same way in their first step; "": they have not."""
        alike = {
            old.incarnation
            for old in self._seen
            if old.in_first_step
            and old.fingerprint == new.fingerprint
            and new.step - old.step < FIRST_STEPS_MAX  # else replacements between them have trained
        }
        if not new.in_first_step or len(alike) < FIRST_STEPS_MAX:
            return ""
        return (
            f"{new.fingerprint} on rank {new.rank} {at_step(new.step)}: {len(alike)} replacements failed so, each in its first "
            "step: not the hardware's"
        )

    def _same(self, old: _Seen, new: _Seen) -> str:
        """Return why two failures are the same bug of the script; "": they are not known to be."""
        if old.fingerprint != new.fingerprint or old.incarnation == new.incarnation:
            return ""
        who = f"rank {old.rank} before" if old.rank == new.rank else f"rank {old.rank}"
        if old.step == new.step:
            return f"{new.fingerprint} on rank {new.rank} {at_step(new.step)}, as on {who}: not the hardware's"
        if new.fingerprint not in CRASHES and new.at_ms - old.at_ms <= self.window_ms:
            return f"{new.fingerprint} on rank {new.rank} and on {who} within {self.window_ms} ms: not the hardware's"
        return ""
