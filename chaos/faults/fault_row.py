"""One row of the table of faults: all that the harness, the simulator and the judges know about one kind of fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Generic, NamedTuple, Protocol, TypeVar

from rackrun.chaos.faults.fault_types import BaseFault, Complaint, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.strike_tools import Injected, Machine, StrikeTools
from rackrun.chaos.faults.targets import Target
from rackrun.chaos.faults.virtual_strike import VirtualStrike

__all__ = [
    "FaultAndTarget",
    "FaultRow",
    "HookPlace",
    "InProcess",
    "ProcessAction",
    "Need",
    "StrikeCost",
    "HookVisit",
    "always",
]

F = TypeVar("F", bound=BaseFault)
T = TypeVar("T")
FaultAndTarget = tuple[F, Target]
"""A fault, and whom it strikes."""


class StrikeCost(StrEnum):
    """What one strike takes from the job at most."""

    NOTHING = "nothing"
    """Nobody is given up for it."""
    SUBJECTS = "subjects"
    """Its subjects, each for as long as another worker takes to start."""
    SUBJECTS_AT_ONCE = "subjects at once"
    """Its subjects: surely all of them, in one moment."""
    SLOTS = "slots"
    """The slots of its subjects, for good."""


class Need(Enum):
    """What a job must be given for a fault, before it starts."""

    DRIVER = auto()
    """A fake GPU driver, and a rack file."""
    HOSTS = auto()
    """A host of its own for each tray."""
    PROXY = auto()
    """A proxy between the agents and the coordinator."""
    DISK = auto()
    """A file system of its own."""
    CLOCKS = auto()
    """Wall clocks that can be moved."""
    EXTRA_PROCESSES = auto()
    """Processes that are started beside the job's own."""
    SNAPSHOTS = auto()
    """Shards, whose snapshots are all that is left of them when a worker is lost."""


class HookPlace(Enum):
    """Places in the code of a process of the job at which a fault can be carried out from inside."""

    STEP = auto()
    """The beginning of an attempt of a step."""
    UPDATE = auto()
    """Before the first optimizer step of a step, when the gradients are complete."""
    COLLECTIVE = auto()
    """Before a collective."""
    POINT = auto()
    """A point of `rackrun.chaos.faults.crash_points`."""
    SAMPLES = auto()
    """The beginning of a micro-batch."""


class HookVisit(NamedTuple):
    """A process has come to a place."""

    place: HookPlace
    name: str = ""
    """The name of the point."""
    nth: int = 0
    """How often the process has come to the point."""


class InProcess(Protocol):
    """What a fault can do inside a process of the job. It says what it does first: some faults end the process."""

    @property
    def visit(self) -> HookVisit:
        """The place that the process has come to."""

    def tell(self, detail: str) -> None:
        """Report that the fault is being carried out."""

    def step(self) -> int:
        """Return the number of the step in hand, or -1."""

    def flip_parameters(self) -> None:
        """Flip one bit of the parameters, and report it."""

    def flip_gradients(self) -> None:
        """Flip one bit of the gradients, and report it."""

    def poison(self, how: str, does: str) -> None:
        """Poison one of the samples in hand, for all processes, and report what it ``does``."""


@dataclass(frozen=True, slots=True)
class ProcessAction(Generic[F]):
    """How a fault is carried out inside a process of the job."""

    due: Callable[[F, HookVisit], bool]
    """Whether the fault is carried out at this visit."""
    run: Callable[[F, InProcess], None]


def always(value: T) -> Callable[..., T]:
    """Return a function that returns ``value`` whatever it is given."""
    return lambda *_: value


_NO_COMPLAINT, _NO_TEXT, _NEVER = always(None), always(""), always(False)
_NO_NEEDS: Callable[..., frozenset[Need]] = always(frozenset())
_EMPTY: Callable[..., tuple[()]] = always(())


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow(Generic[F]):
    """One kind of fault. What has no default must be said for every fault."""

    example: F
    """A fault of this kind that can be injected wherever its kind can."""

    # -- in a real job
    how: str | Callable[[Machine], str]
    """How it is injected, for people."""
    inject: Callable[[F, StrikeTools], Injected]
    refusal: Callable[[F, Subjects, Machine], Complaint | None] = _NO_COMPLAINT
    """Why a real job cannot have the fault at a subject of this kind."""
    nonsense: Callable[[F], Complaint | None] = _NO_COMPLAINT
    """What is wrong with its fields in any job, besides what is wrong with any fault's."""
    inside: ProcessAction[F] | None = None
    needs: Callable[[F], frozenset[Need]] = _NO_NEEDS
    points: Callable[[F], tuple[str, ...]] = _EMPTY
    """The points of `rackrun.chaos.faults.crash_points` that it waits for. They may never be reached."""
    by_signals: bool = False
    """It strikes processes from outside, and so any launcher's ranks."""

    # -- in virtual time
    simulate: Callable[[F, VirtualStrike], bool] | None
    """Strike one subject in virtual time, and return whether that took effect. None: the simulator refuses the fault."""
    not_simulated: Callable[[F, Subjects], str] = _NO_TEXT
    """Why the simulator refuses such a fault at a subject of this kind, or ""."""

    # -- what it may do to a job
    cost: Callable[[F, Subjects], StrikeCost]
    hopeless: Callable[[F], str] = _NO_TEXT
    """Why no job survives it, or ""."""
    unsure: Callable[[F, Subjects, bool], str] = _NO_TEXT
    """Why nobody knows what comes of it, or "". The last argument: it is the only fault of its plan."""
    looks_like: Callable[[F], str] = _NO_TEXT
    """What the end of a rank looks like afterwards: a signal, an exception, an exit code; "" where none applies."""
    justifies_loss: Callable[[F, float | None, bool], bool]
    """Whether who is struck may be given up. Given the seconds for which the fault lasted (None: it was not taken back)
    and whether only workers were struck."""
    endangers_all: Callable[[F], bool] = _NEVER
    """Whether anybody may be given up for it."""

    # -- drawn, and made smaller
    draw: Callable[[random.Random], FaultAndTarget[F]]
    """Draw what a campaign of real runs strikes with."""
    variants: Mapping[Profile, Callable[[random.Random, float | None], Sequence[FaultAndTarget[F]]]] = field(
        default_factory=dict
    )
    """Profile -> variants of the fault in it. Given a random ``for_s``; None: the profile has none."""
    in_soak: Mapping[str, F] = field(default_factory=dict)
    """Name -> a variant that a soak can strike ranks with, again and again."""
    simpler: Callable[[F], Iterable[F]] = _EMPTY
    """Simpler faults of the same kind."""
