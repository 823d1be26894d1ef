"""The types that a policy function receives and returns: `Failure`, `ClusterView`, `Decision`.

`rackrun.policy` exports them to users. A view holds only facts and measured costs; `rackrun.core.policy.rungs` computes
from it what each rung would cost.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from rackrun.protocol.ids import Generation, Rank, SlotId, TrayId

__all__ = [
    "ClusterView",
    "Costs",
    "Decision",
    "Failure",
    "Option",
    "Priors",
    "ProviderNow",
    "RankNow",
    "Rules",
    "Rung",
    "SpareNow",
    "TrayNow",
    "Weights",
    "FailureCause",
]


class Rung(Enum):
    """The answers to a failure, from the lightest to the heaviest. If two cost the same, the first of them is taken."""

    ABSORB = "absorb"
    """No rank is lost: repeat the step in place."""
    SWAP = "swap"
    """Spares that are ready take over the lost ranks."""
    MOVE = "move"
    """As SWAP, and the living members of a lost rank's bound group move with it to another NVLink clique."""
    ACQUIRE = "acquire"
    """Ask a provider for another rack. Until it comes, all ranks wait, or train on as after a shrink
    (`Decision.meanwhile`)."""
    SHRINK = "shrink"
    """Go on without the lost ranks, with the same global batch, and grow again when workers can join."""
    WAIT = "wait"
    """All ranks wait, up to a deadline, until a spare is ready or a tray has come. Then swap."""
    HOLD = "hold"
    """As WAIT, without a deadline: until a spare is ready, or an operator ends it. It is taken only if the policy names
    it."""
    RESTART = "restart"
    """Every rank begins again from the newest checkpoint on disk, or from step 0."""
    STOP = "stop"
    """End the job with the reason."""

    @property
    def only_by_name(self) -> bool:
        """Whether only a policy that names this rung takes it, whatever it costs."""
        return self is Rung.HOLD


class FailureCause(Enum):
    """What a failure is attributed to."""

    USER = "user"
    """The script: the same error occurred at the same step on other hardware. Another attempt would fail again."""
    HARDWARE = "hardware"
    """The hardware. Failures whose cause cannot be told apart count as this, including the first exception of a
    script."""
    NETWORK = "network"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    """Somebody else wants the machine: SIGTERM from outside."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that went wrong since the last plan, as one failure."""

    what: str
    """Short description: ``ranks 2, 3 lost (SIGKILL)``."""
    whose: FailureCause = FailureCause.HARDWARE
    ranks: tuple[Rank, ...] = ()
    """Lost ranks; (): none is lost, as in a stall or after a broken connection."""
    slots: tuple[SlotId, ...] = ()
    """Where the lost ranks ran, in the order of ``ranks``."""
    evidence: tuple[str, ...] = ()
    """What is known about each lost rank: ``rank 2 on tray-0/2: SIGKILL``."""
    planned: bool = False
    """Whether all ranks stood between two steps when the rank was taken out, so that no step is computed again."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs measured in this job, each the median of its last few values. None: not measured yet; `Priors` is used
    instead."""

    step_s: float | None = None
    regroup_s: float | None = None
    """Seconds from a plan that restores nothing until every rank computes again."""
    takeover_s: float | None = None
    """As ``regroup_s``, for a plan in which ranks received their state from peers or snapshots; the total."""
    copy_bytes_per_s: float | None = None
    """Rate at which state is copied from one tray to another."""
    state_bytes: float | None = None
    """Bytes of state of one rank."""
    start_s: float | None = None
    """Seconds from a worker's start until it is ready for its first step."""
    repair_s: float | None = None
    """Seconds from the loss of a tray until it has come back."""
    acquire_s: float | None = None
    """Seconds from a request for a rack until the first of its trays has joined."""
    checkpoint_age_s: float | None = None
    """Seconds of training since the newest checkpoint on disk; None: there is none."""
    checkpoint_every_s: float | None = None


class Priors(msgspec.Struct, frozen=True, kw_only=True):
    """Values that are used for costs that have not been measured."""

    step_s: float = 1.0
    regroup_s: float = 1.0
    copy_bytes_per_s: float = 1e9
    load_bytes_per_s: float = 2.5e8
    """Rate at which one rank loads from disk. Never measured yet."""
    state_bytes: float = 1e9
    start_s: float = 30.0
    repair_s: float = 1800.0
    """Time in which a tray reboots."""
    acquire_s: float = 600.0
    """Time to get a rack from a batch system whose queue is not full. A provider with a better estimate overrides
    it."""
    relaunch_s: float = 3600.0
    """Time until a stopped job is started again."""
    mtbf_gpu_s: float = 1.8e8
    """50,000 hours: 419 interruptions of 16,384 GPUs in 54 days (The Llama 3 Herd of Models, section 3.3.4)."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the three losses that a decision minimizes; each loss is in GPU-seconds."""

    goodput: float = 1.0
    """Weight of ranks multiplied by the time in which they do nothing new."""
    cost: float = 0.0
    """Weight of all GPUs that the job holds in that time, spares included. A stopped job holds none."""
    resilience: float = 1.0
    """Weight of the extra cost that the next failure is expected to have because no spare is left."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The user's rules about rungs. If both ``order`` and ``never`` are empty, the cheapest rung is taken."""

    order: tuple[Rung, ...] = ()
    """The first possible rung of this list is taken. `Rung.ABSORB` comes first and `Rung.STOP` last unless the list
    names them."""
    never: tuple[Rung, ...] = ()
    """Rungs that are not taken; the cheapest of the others is."""
    meanwhile: Literal["", "wait", "train"] = ""
    """`Decision.meanwhile` if the order leads to `Rung.ACQUIRE`."""


class TrayNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tray at the moment of a decision."""

    tray: TrayId
    host: str
    slots: int
    clique: str = ""
    """The tray's NVLink clique; "": not known."""
    unusable: tuple[SlotId, ...] = ()
    """Slots in which no worker may be started and to which no rank may move: unfit, judged bad, or quarantined."""


class RankNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A rank at the moment of a decision."""

    rank: Rank
    slot: SlotId
    alive: bool


class SpareNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A spare at the moment of a decision."""

    slot: SlotId
    state: Literal["ready", "starting", "unfit"]


class ProviderNow(msgspec.Struct, frozen=True, kw_only=True):
    """The provider of further racks (``--provider``) and the state of requests to it."""

    expected_s: float | None = None
    """How long a request takes, according to the provider."""
    asked_s: float | None = None
    """Seconds since the pending request was made; None: no request is pending."""
    came: bool = False
    """Whether a rack has come and its workers are starting or can be started."""
    patience_s: float = 3600.0
    """How long the next stage is waited for: the rack, its trays, or its workers."""
    why_not: str = ""
    """Why the provider is not asked now."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The job at the moment of a decision, when all living ranks have parked with their state."""

    world_size: int
    generation: Generation = Generation(0)
    """The generation that the decision begins."""
    step: int = -1
    """The last committed step."""
    mesh: tuple[tuple[str, int], ...] = ()
    trays: tuple[TrayNow, ...] = ()
    ranks: tuple[RankNow, ...] = ()
    spares: tuple[SpareNow, ...] = ()
    usable_slots: int = 0
    """Usable slots of living trays, including those of living ranks. If no copy of some state is left, also those that
    may become usable again, because a restart waits for them."""
    returning_slots: int = 0
    """Slots of lost trays whose agents are being started again."""

    takeovers: dict[Rank, SlotId] = {}
    """The slot of the spare that would take over each lost rank now; {}: no rank is lost, or no takeover is
    possible."""
    uprooted: dict[Rank, SlotId] = {}
    """Living ranks that would have to move with them, and the slots they would move to."""
    moved: tuple[Rank, ...] = ()
    """Living ranks that have already left their slots in order to move, and now wait for the takeover."""
    short: int = 0
    """How many more workers have to be ready before all lost ranks can be taken over."""
    coming: int = 0
    """How many workers are starting or can be started now."""
    hoped: int = 0
    """Number of slots whose GPU is unfit for a reason that may pass by itself, plus ``returning_slots``."""
    why_short: str = ""
    obstacle: str = ""
    """Why neither spares nor time help: a silent rank is awaited, which keeps the only copy of some state; "": there is
    no such rank."""
    rollback_steps: int | None = 0
    """Number of steps that all ranks compute again if state is restored from memory; None: no copy of some state is
    left in memory."""
    may_begin_again: bool = False
    """Whether a restart is allowed: there is a checkpoint, the user allows a restart from step 0, or nothing would be
    lost."""
    shrink_to: int = 0
    """Number of ranks that can go on without the lost ones; 0: none, see ``why_no_shrink``."""
    why_no_shrink: str = "the number of ranks is fixed (--min-ranks 0)"
    exact: bool = False
    """Whether losses and weights have the same bits on any number of ranks (``reduction="exact"``). If not, the default
    policy shrinks only when no rung that keeps the bits is left."""
    placeable: bool = True
    """Whether all ranks find slots for a restart, with their bound groups inside NVLink cliques."""
    restarts_left: int = 0

    waited_s: float = 0.0
    """Seconds since the generation was broken or, if ranks took longer to park than usual, since the last of them had:
    until then nothing could be decided."""
    held_s: float = 0.0
    """How many of these seconds all ranks waited in a hold (`Rung.HOLD`). They do not count against any patience."""
    start_patience_s: float = 600.0
    """How long starting workers, and GPUs that may become fit, are waited for (``join_timeout``)."""
    repair_patience_s: float = 0.0
    """How long other hardware is waited for (``--wait-for-hardware``)."""
    provider: ProviderNow | None = None
    absorbs: int = 0
    """How many times this step has already been repeated in place."""
    recoveries: int = 0
    """Number of recoveries in this job so far."""
    costs: Costs = Costs()

    @property
    def comes_by_itself(self) -> bool:
        """Whether all lost ranks can be taken over without any new or returning hardware."""
        return self.coming + self.hoped >= self.short

    @property
    def patience_used_s(self) -> float:
        """Seconds that count against ``start_patience_s`` and ``repair_patience_s``: not those of a hold."""
        return self.waited_s - self.held_s

    @property
    def checkpoint(self) -> bool:
        """Whether there is a checkpoint on disk."""
        return self.costs.checkpoint_age_s is not None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """What one rung would mean now."""

    rung: Rung
    why_not: str = ""
    """Why the rung is impossible; "": it is possible."""
    cost_gpu_s: float = 0.0
    """Predicted, weighted cost in GPU-seconds; 0 if the rung is impossible."""
    figures: dict[str, float] = {}
    """The terms of the cost: seconds for all ranks (``*_s``) and weighted GPU-seconds (``*_gpu_s``)."""
    meanwhile: Literal["", "wait", "train"] = ""
    """For `Rung.ACQUIRE`: what the ranks do until the rack comes. It is the cheaper choice unless the other was
    requested."""

    @property
    def possible(self) -> bool:
        """Whether the rung can be taken now; otherwise ``why_not`` says why it cannot."""
        return not self.why_not


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. A user's policy sets the rung and a reason for people; the core fills in the rest."""

    rung: Rung
    reason: str = ""
    targets: dict[Rank, SlotId] = {}
    """The slot that takes over each rank. {}: as `ClusterView.takeovers`, which is the only other value that is
    possible."""
    deadline_s: float = 0.0
    """How long to wait from now, for `Rung.WAIT`; 0: as long as allowed. `Rung.HOLD` has no deadline."""
    meanwhile: Literal["", "wait", "train"] = ""
    """For `Rung.ACQUIRE`: until the rack has come all ranks ``wait``, or ``train`` on without the lost ranks, as after
    a shrink. "": whichever costs less."""
    cost_gpu_s: float = 0.0
    """Predicted cost in weighted GPU-seconds."""
    figures: dict[str, float] = {}
    options: tuple[Option, ...] = ()
    """All rungs, as they were evaluated."""
    by: str = "default"
    """What decided: ``default``, ``order`` (a list of rungs), ``user`` (a function), or ``rule`` (there was no
    choice)."""

    @property
    def is_last(self) -> bool:
        """Whether no rung but a stop is possible."""
        return not any(option.possible for option in self.options if option.rung is not Rung.STOP)
