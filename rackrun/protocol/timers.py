"""Timers: what the core asks to be woken for (`SetTimer`, `TimerFired`).

A timer is never cancelled. The core ignores one that is no longer needed, and each that names an older generation.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rackrun.protocol.ids import Generation, Incarnation, SlotId

__all__ = [
    "JobBegins",
    "BreakerWakes",
    "RecoverySettled",
    "CopiesOver",
    "DrainOver",
    "ExitsOver",
    "FenceOver",
    "UnfitWaitOver",
    "GatherOver",
    "GrowthDue",
    "HoldReminder",
    "JoinOver",
    "JoinGraceOver",
    "SelfExitOver",
    "OfGeneration",
    "CondemnedExitsOver",
    "ParkOver",
    "LateStallsGathered",
    "PauseOver",
    "PolicyOver",
    "QuarantineOver",
    "RackStageOver",
    "RecoverOver",
    "RepairOver",
    "ResumeOver",
    "StallsGathered",
    "StandstillsGathered",
    "StartsGathered",
    "Timer",
    "timer_named",
]


class _Timer(msgspec.Struct, frozen=True, tag_field="timer", gc=False):
    def __str__(self) -> str:
        """The kind and the fields, with colons between them: ``fence:tray-0/1:4``."""
        kind = self.__struct_config__.tag
        return ":".join([str(kind), *(str(getattr(self, name)) for name in self.__struct_fields__)])


class OfGeneration(_Timer, frozen=True, gc=False):
    """A timer of one generation. It is ignored in every other."""

    generation: Generation


# -- forming, and the end ----------------------------------------------------------------------------------------------
class JobBegins(_Timer, frozen=True, tag="begin", gc=False):
    """The job's time begins."""


class JoinOver(_Timer, frozen=True, tag="join", gc=False):
    """The time is over in which trays may join."""


class JoinGraceOver(_Timer, frozen=True, tag="last-call", gc=False):
    """Enough trays have joined, and no further one is waited for."""

    joined: int = 0


class UnfitWaitOver(_Timer, frozen=True, tag="fit", gc=False):
    """The time is over in which unfit GPUs may become fit."""


class StartsGathered(OfGeneration, frozen=True, tag="bugs", gc=False):
    """The time is over in which other ranks may fail in the same way before the first step."""


class DrainOver(_Timer, frozen=True, tag="drain", gc=False):
    """The time is over in which ranks may reach the step boundary at which the job stops."""


class ExitsOver(OfGeneration, frozen=True, tag="exits", gc=False):
    """The time is over in which workers may exit, in a restart or at the end."""


# -- recovery ----------------------------------------------------------------------------------------------------------
class GatherOver(OfGeneration, frozen=True, tag="gather", gc=False):
    """The time is over in which losses that belong together may arrive."""


class ParkOver(OfGeneration, frozen=True, tag="park", gc=False):
    """The time is over in which members may park."""


class CondemnedExitsOver(OfGeneration, frozen=True, tag="owed", gc=False):
    """The time is over in which condemned workers may exit and leave their snapshots."""


class RecoverOver(OfGeneration, frozen=True, tag="recover", gc=False):
    """The time is over in which spares may become ready."""


class RepairOver(OfGeneration, frozen=True, tag="repair", gc=False):
    """The time is over in which hardware may come back, or the policy's own deadline is."""


class HoldReminder(OfGeneration, frozen=True, tag="hold", gc=False):
    """If all ranks are still held, this is said once more."""


class ResumeOver(OfGeneration, frozen=True, tag="resume", gc=False):
    """The time is over in which members may resume."""


class FenceOver(_Timer, frozen=True, tag="fence", gc=False):
    """The time is over in which the others may leave the generation of a condemned worker, which is killed now."""

    slot: SlotId
    incarnation: Incarnation


class StallsGathered(OfGeneration, frozen=True, tag="stalled", gc=False):
    """The time is over in which stalls that belong together may be reported."""


class LateStallsGathered(OfGeneration, frozen=True, tag="judge", gc=False):
    """The time is over in which further stalls may be reported, too."""


class PolicyOver(_Timer, frozen=True, tag="policy", gc=False):
    """The time is over in which the user's function may answer."""

    question: int


# -- hardware and size -------------------------------------------------------------------------------------------------
class StandstillsGathered(_Timer, frozen=True, tag="standstills", gc=False):
    """The time is over in which trays that stood still together may report it."""


class BreakerWakes(_Timer, frozen=True, tag="breaker", gc=False):
    """The circuit breaker looks at the verdicts that it holds back."""


class SelfExitOver(_Timer, frozen=True, tag="failed", gc=False):
    """The time is over in which a worker whose GPU has failed may end by itself."""

    slot: SlotId
    incarnation: Incarnation


class QuarantineOver(_Timer, frozen=True, tag="quarantine", gc=False):
    """A slot may be used again."""

    slot: SlotId


class PauseOver(OfGeneration, frozen=True, tag="pause", gc=False):
    """The time is over in which ranks may pause."""


class CopiesOver(_Timer, frozen=True, tag="copies", gc=False):
    """An empty tray has been kept long enough for what it keeps for others."""

    request: str


class RecoverySettled(_Timer, frozen=True, tag="calm", gc=False):
    """The first steps after a recovery are done, and spares may start beside the next."""

    generation: Generation


class GrowthDue(_Timer, frozen=True, tag="grow", gc=False):
    """The world may try to grow again."""

    due_ms: int = 0


class RackStageOver(_Timer, frozen=True, tag="rack", gc=False):
    """The time is over that a rented rack has for one stage."""

    request: int
    stage: str


Timer: TypeAlias = (
    JobBegins
    | JoinOver
    | JoinGraceOver
    | UnfitWaitOver
    | StartsGathered
    | DrainOver
    | ExitsOver
    | GatherOver
    | ParkOver
    | CondemnedExitsOver
    | RecoverOver
    | RepairOver
    | HoldReminder
    | ResumeOver
    | FenceOver
    | StallsGathered
    | LateStallsGathered
    | PolicyOver
    | StandstillsGathered
    | BreakerWakes
    | SelfExitOver
    | QuarantineOver
    | PauseOver
    | CopiesOver
    | RecoverySettled
    | GrowthDue
    | RackStageOver
)
_KINDS: dict[str, type[_Timer]] = {str(kind.__struct_config__.tag): kind for kind in Timer.__args__}


def timer_named(name: str) -> Timer:
    """Return the timer whose string is ``name``. Journals of format 3 hold timers in this form.

    Raises ValueError for any other text.
    """
    kind, colon, rest = name.partition(":")
    found = _KINDS.get(kind)
    if found is None:
        raise ValueError(f"{name!r} is no timer")
    fields = found.__struct_fields__
    values = ([rest] if len(fields) == 1 else list(rest.rpartition(":")[::2])) if colon and fields else []
    try:
        raw = dict(zip(fields, values, strict=False)) | {"timer": kind}
        timer: Timer = msgspec.convert(raw, Timer, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name!r} is no timer: {error}") from None
    return timer
