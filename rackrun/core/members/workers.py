"""One worker as the core sees it: where it stands, and which steps lead from there.

::

    STARTING --ready--> READY --train--> TRAINING --break--> BREAKING --parked--> PARKED --resume--> RESUMING
                          |                 ^                   ^                                     |   |
                          +----resume-------|-------------------|---------------> RESUMING            |   |
                                            +-------------------|--------------resumed----------------+   |
                                                                +-----------------break-------------------+

Besides: ``fence`` leads from everywhere to FENCED, ``exit`` to EXITED, ``release`` (the job is done) to RELEASED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rackrun.errors import InternalError
from rackrun.protocol.commands import Worker
from rackrun.protocol.events import Failure, WorkerExited, WorkerParked
from rackrun.protocol.ids import Generation, Rank

__all__ = ["TRANSITIONS", "InvalidTransition", "Loss", "Trigger", "WorkerRecord", "WorkerState", "why_exited"]

STORY_MAX = 32
"""What a worker's story keeps: enough to explain an impossible transition, bounded in a run of months."""


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    TRAINING = "training"
    BREAKING = "breaking"
    PARKED = "parked"
    RESUMING = "resuming"
    RELEASED = "released"
    FENCED = "fenced"
    EXITED = "exited"


class Trigger(StrEnum):
    READY = "ready"
    TRAIN = "train"
    BREAK = "break"
    PARKED = "parked"
    RESUME = "resume"
    RESUMED = "resumed"
    RELEASE = "release"
    FENCE = "fence"
    EXIT = "exit"


def _leave(**further: WorkerState) -> Mapping[Trigger, WorkerState]:
    """What is possible from every living state, and what is possible from this one besides."""
    further |= {"exit": WorkerState.EXITED, "fence": WorkerState.FENCED}
    return {Trigger(name): state for name, state in further.items()}


TRANSITIONS: Mapping[WorkerState, Mapping[Trigger, WorkerState]] = {
    WorkerState.STARTING: _leave(ready=WorkerState.READY, release=WorkerState.RELEASED),
    WorkerState.READY: _leave(train=WorkerState.TRAINING, resume=WorkerState.RESUMING, release=WorkerState.RELEASED),
    WorkerState.TRAINING: _leave(**{"break": WorkerState.BREAKING, "release": WorkerState.RELEASED}),
    WorkerState.BREAKING: _leave(parked=WorkerState.PARKED),
    WorkerState.PARKED: _leave(resume=WorkerState.RESUMING),
    WorkerState.RESUMING: _leave(**{"resumed": WorkerState.TRAINING, "break": WorkerState.BREAKING}),
    WorkerState.RELEASED: _leave(),
    WorkerState.FENCED: {Trigger.EXIT: WorkerState.EXITED},
    WorkerState.EXITED: {},
}
"""The docs draw their diagram from this table."""


class InvalidTransition(InternalError):
    """A worker was led where no step leads. ``story`` is how it came to where it stands."""

    def __init__(self, record: WorkerRecord, trigger: Trigger) -> None:
        worker = record.worker
        story = " > ".join(record.story)
        super().__init__(
            f"{worker.slot} incarnation {worker.incarnation} is {record.state.value} and cannot {trigger.value} ({story})",
            remedy="please report this, with the journal.",
        )
        self.story = tuple(record.story)


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One incarnation, from its start to its exit. The rack owns it; the job gives it a rank."""

    worker: Worker
    rank: Rank | None
    """None for a spare."""
    state: WorkerState = WorkerState.STARTING
    stateful: bool = False
    """Its training state is that of its rank: it began with it, or has restored it."""
    resumed_in: Generation = Generation(0)
    finished: bool = False
    returned_in_ms: int = -1
    """`WorkerFinished.took_ms`."""
    lied: bool = False
    """Its state was not that of its replicas: nothing that it leaves is used."""
    fixed: str = "it has not come to its first step"
    """Why the number of ranks cannot change under it; "": it can."""
    reenters: bool = False
    """It does so by entering ``main`` again."""
    built_for: int = 0
    """The ranks of the world that it was started for: a spare's model is cut for them."""
    exact: bool = False
    """What it computes does not depend on the number of ranks."""
    shards: int = 0
    """Micro-batches of the global batch, as it says; 0: it has not."""
    parked: WorkerParked | None = None
    fenced_for: str = ""
    _steps: list[str] = field(default_factory=list)

    def move(self, trigger: Trigger, note: str = "") -> None:
        """Take one step of the table; raises `InvalidTransition` where there is none, and then changes nothing."""
        try:
            state = TRANSITIONS[self.state][trigger]
        except KeyError:
            raise InvalidTransition(self, trigger) from None
        self.state = state
        steps = self._steps
        steps.append(f"{trigger} ({note})" if note else trigger)
        if len(steps) > STORY_MAX:
            del steps[0]

    @property
    def story(self) -> list[str]:
        """How it came to where it stands."""
        return [WorkerState.STARTING.value, *map(str, self._steps)][-STORY_MAX:]

    @property
    def alive(self) -> bool:
        """It may still take part: neither gone nor condemned."""
        return self.state is not WorkerState.FENCED and self.state is not WorkerState.EXITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The rack tells the job: this worker will not take part any more."""

    record: WorkerRecord
    because: str
    exit: WorkerExited | None = None
    """None when nobody saw it end: its tray is lost, or its fencing is under way."""

    @property
    def failure(self) -> Failure | None:
        return self.exit.failure if self.exit else None


_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def why_exited(event: WorkerExited) -> str:
    """How a process ended, in words: ``SIGKILL``, ``exit code 3``, ``builtins.ValueError at train.py:12``."""
    if event.failure is not None:
        return f"{event.failure.type} at {event.failure.where}"
    number = event.signal if event.signal is not None else -(event.exit_code or 0)
    if number > 0:
        return _SIGNALS.get(number, f"signal {number}")
    return f"exit code {event.exit_code}" if event.exit_code is not None else "gone"
