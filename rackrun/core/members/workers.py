"""One worker as the core sees it: its state, and the transitions of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rackrun.core.members.transitions import STORY_MAX
from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import Worker
from rackrun.protocol.events import SIGNAL_NAMES, ScriptFailure, WorkerExited, WorkerParked
from rackrun.protocol.ids import Generation, Rank

__all__ = ["TRANSITIONS", "Loss", "Trigger", "WorkerRecord", "WorkerState", "why_exited"]


class WorkerState(StrEnum):
    """State of a worker; `TRANSITIONS` says what leads from one to the next."""

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
    """What moves a worker from one state to the next."""

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
    """Return the transitions of a living state: ``further``, plus ``exit`` and ``fence``, which every living state
    has."""
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
"""The transition table. `docs/state_machines.md` draws it."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One incarnation of a worker, from its start to its exit. The rack owns it; the job gives it a rank."""

    worker: Worker
    rank: Rank | None
    """The worker's rank; None for a spare."""
    state: WorkerState = WorkerState.STARTING
    stateful: bool = False
    """Whether the worker has its rank's training state: it began with it or has restored it."""
    resumed_in: Generation = Generation(0)
    wrong_in: Generation = Generation(-1)
    """The latest generation in which its state was found wrong (`ReplicasDiffer`); -1: none. That it had resumed in
    that generation does not make it stateful again."""
    finished: bool = False
    returned_in_ms: int = -1
    """As `WorkerFinished.took_ms`."""
    corrupt: bool = False
    """Whether the worker's state differed from its replicas'. Nothing that it leaves behind is used."""
    fixed: str = "it has not come to its first step"
    """Why the number of ranks cannot change under this worker; "": it can change."""
    reenters: bool = False
    """Whether the worker changes size by entering ``main`` again."""
    built_for: int = 0
    """World size for which the worker was started; a spare's model is sharded for it."""
    exact: bool = False
    """Whether the worker's results are independent of the number of ranks."""
    shards: int = 0
    """Micro-batches of the global batch, as the worker reported; 0: not reported."""
    parked: WorkerParked | None = None
    fenced_for: str = ""
    _steps: list[str] = field(default_factory=list)

    def move(self, trigger: Trigger, note: str = "") -> None:
        """Make one transition of the table. Raises `InvalidTransition`, and changes nothing, if there is none."""
        try:
            state = TRANSITIONS[self.state][trigger]
        except KeyError:
            worker = self.worker
            what = f"{worker.slot} incarnation {worker.incarnation}"
            raise InvalidTransition(what, self.state.value, trigger.value, self.story) from None
        self.state = state
        steps = self._steps
        steps.append(f"{trigger} ({note})" if note else trigger)
        if len(steps) > STORY_MAX:
            del steps[0]

    @property
    def is_wrong(self) -> bool:
        """Whether its state was found wrong, and it has not resumed with another since, as far as its reports say."""
        return not self.stateful and self.wrong_in >= self.resumed_in

    @property
    def story(self) -> list[str]:
        """The worker's latest transitions, oldest first."""
        return [WorkerState.STARTING.value, *map(str, self._steps)][-STORY_MAX:]

    @property
    def alive(self) -> bool:
        """Whether the worker may still take part: it has neither exited nor been condemned."""
        return self.state is not WorkerState.FENCED and self.state is not WorkerState.EXITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The rack's report to the job that a worker no longer takes part."""

    record: WorkerRecord
    because: str
    exit: WorkerExited | None = None
    """The exit of the worker; None if it was not seen: its tray is lost, or it is being fenced."""

    @property
    def failure(self) -> ScriptFailure | None:
        """The script's failure as the worker reported it; None if there was none or its exit was not seen."""
        return self.exit.failure if self.exit else None


def why_exited(event: WorkerExited) -> str:
    """Describe how a process ended: ``SIGKILL``, ``exit code 3``, ``builtins.ValueError at train.py:12``."""
    if event.failure is not None:
        return f"{event.failure.type} at {event.failure.where}"
    number = event.signal if event.signal is not None else -(event.exit_code or 0)
    if number > 0:
        return SIGNAL_NAMES.get(number, f"signal {number}")
    return f"exit code {event.exit_code}" if event.exit_code is not None else "gone"
