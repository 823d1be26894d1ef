"""What a policy is shown, and what it answers: `Failure`, `ClusterView`, `Decision`. `rackrun.policy` gives them to the user.

A view holds facts and measured costs only; what each rung would cost is made of it by `rackrun.core.policy.rungs`.
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
    "Whose",
]


class Rung(Enum):
    """The answers to a failure, from the lightest to the heaviest: of two that cost the same, the first is taken."""

    ABSORB = "absorb"
    """Nobody is lost: the step is done again in place."""
    SWAP = "swap"
    """Spares that are ready take the lost ranks over."""
    MOVE = "move"
    """So do they, and the living rest of a bound group moves with its lost member into another NVLink clique."""
    ACQUIRE = "acquire"
    """Ask a provider for another rack. All stand still until it has come, or go on as after a shrink meanwhile (`Decision.meanwhile`)."""
    SHRINK = "shrink"
    """Go on without the lost ranks, with the same global batch, and grow again when workers can join."""
    WAIT = "wait"
    """All stand still until a spare is ready or a tray has come, then swap; up to a deadline."""
    RESTART = "restart"
    """Every rank begins again, from the newest checkpoint on disk, or from step 0."""
    STOP = "stop"
    """The job ends, with the reason."""


class Whose(Enum):
    """Whose fault it is taken for."""

    USER = "user"
    """The script's: the same error, at the same step, on other hardware. Trying again would only fail again."""
    HARDWARE = "hardware"
    """What nobody can tell apart is taken for the hardware's, the first exception of a script too."""
    NETWORK = "network"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    """Somebody wants the machine: SIGTERM from outside."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened since the last plan, as one."""

    what: str
    """``ranks 2, 3 lost (SIGKILL)``."""
    whose: Whose = Whose.HARDWARE
    ranks: tuple[Rank, ...] = ()
    """Lost; () when nobody is: a stall, or a connection that broke."""
    slots: tuple[SlotId, ...] = ()
    """Where they were, in the order of ``ranks``."""
    evidence: tuple[str, ...] = ()
    """What is known of each: ``rank 2 on tray-0/2: SIGKILL``."""
    planned: bool = False
    """All stood between two steps when the rank was taken out: no step is done again."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Measured in this job, each the median of the last few. None: not yet, and `Priors` stand in."""

    step_s: float | None = None
    regroup_s: float | None = None
    """From a plan that restores nothing until every rank computes again."""
    takeover_s: float | None = None
    """The same of a plan in which ranks got their state from peers or snapshots, all in."""
    copy_bytes_per_s: float | None = None
    """Of state, from one tray to another."""
    state_bytes: float | None = None
    """Of one rank."""
    start_s: float | None = None
    """Of a worker, until it stands at its first step."""
    repair_s: float | None = None
    """From the loss of a tray until it has come back."""
    acquire_s: float | None = None
    """From a request for a rack until the first of its trays has joined."""
    checkpoint_age_s: float | None = None
    """Training time since the newest checkpoint on disk; None: there is none."""
    checkpoint_every_s: float | None = None


class Priors(msgspec.Struct, frozen=True, kw_only=True):
    """What an unknown cost is taken for."""

    step_s: float = 1.0
    regroup_s: float = 1.0
    copy_bytes_per_s: float = 1e9
    load_bytes_per_s: float = 2.5e8
    """Of one rank, from disk. Never measured yet."""
    state_bytes: float = 1e9
    start_s: float = 30.0
    repair_s: float = 1800.0
    """A tray that reboots."""
    acquire_s: float = 600.0
    """A rack from a batch system's queue that is not full. A provider that knows better says so."""
    relaunch_s: float = 3600.0
    """Until somebody starts a stopped job again."""
    mtbf_gpu_s: float = 1.8e8
    """50,000 hours: 419 interruptions of 16,384 GPUs in 54 days (The Llama 3 Herd of Models, section 3.3.4)."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What counts how much; each loss is in GPU-seconds."""

    goodput: float = 1.0
    """Of ranks, times the time in which they do nothing new."""
    cost: float = 0.0
    """Of all GPUs that are held, spares too, in that time. A job that has stopped holds none."""
    resilience: float = 1.0
    """What the next failure is expected to cost more, because no spare is left."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has said of the rungs. Both empty: the cheapest of all."""

    order: tuple[Rung, ...] = ()
    """The first of these that is possible is taken. `Rung.ABSORB` comes before and `Rung.STOP` after them unless they are named."""
    never: tuple[Rung, ...] = ()
    """The cheapest of the others."""
    meanwhile: Literal["", "wait", "train"] = ""
    """`Decision.meanwhile`, when the order comes to `Rung.ACQUIRE`."""


class TrayNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    tray: TrayId
    host: str
    slots: int
    clique: str = ""
    """Its NVLink clique; "": nobody has told."""
    unusable: tuple[SlotId, ...] = ()
    """Where nobody may be started, and no rank may come: unfit, judged bad, or quarantined."""


class RankNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    rank: Rank
    slot: SlotId
    alive: bool


class SpareNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    slot: SlotId
    state: Literal["ready", "starting", "unfit"]


class ProviderNow(msgspec.Struct, frozen=True, kw_only=True):
    """Who gives the job other racks (``--provider``), and what has been asked of it."""

    expected_s: float | None = None
    """How long a request takes, as it says itself."""
    asked_s: float | None = None
    """Since the request that is out; None: none is."""
    came: bool = False
    """A rack has come, and its workers are starting, or can be started."""
    patience_s: float = 3600.0
    """How long the next of these is waited for: the rack, its trays, its workers."""
    why_not: str = ""
    """Why it is not asked now."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The job at the moment of a decision: all living ranks have parked, with their state."""

    world_size: int
    generation: Generation = Generation(0)
    """The one that the decision begins."""
    step: int = -1
    """The last that is committed."""
    mesh: tuple[tuple[str, int], ...] = ()
    trays: tuple[TrayNow, ...] = ()
    ranks: tuple[RankNow, ...] = ()
    spares: tuple[SpareNow, ...] = ()
    usable_slots: int = 0
    """Of living trays, those of ranks that live too."""
    returning_slots: int = 0
    """Of lost trays whose agents are started again."""

    takeovers: dict[Rank, SlotId] = {}
    """Who takes each lost rank over, if it is to be now; {}: nobody is lost, or nobody can."""
    uprooted: dict[Rank, SlotId] = {}
    """Living ranks that would have to move with them."""
    moved: tuple[Rank, ...] = ()
    """Those that were taken out of their seats to move, and wait now for the takeover."""
    short: int = 0
    """So many workers more have to be ready before all lost ranks can be taken over."""
    coming: int = 0
    """So many are starting, or can be started now."""
    hoped: int = 0
    """Slots whose GPU is not fit now, which may pass by itself, and ``returning_slots``."""
    why_short: str = ""
    rollback_steps: int | None = 0
    """Steps that all compute again if state comes from memory; None: no copy of some state is left there."""
    may_begin_again: bool = False
    """A restart is allowed: there is a checkpoint or the user lets it begin at step 0, or nothing would be lost by it."""
    shrink_to: int = 0
    """So many ranks can go on without the lost ones; 0: see ``why_no_shrink``."""
    why_no_shrink: str = "the number of ranks is fixed (--min-ranks 0)"
    exact: bool = False
    """Losses and weights have the same bits on any number of ranks (``reduction="exact"``). Without, a shrink is the default's choice
    only where nothing that keeps the bits is left."""
    placeable: bool = True
    """All ranks find slots for a restart, with their bound groups inside NVLink cliques."""
    restarts_left: int = 0

    waited_s: float = 0.0
    """Since the break."""
    start_patience_s: float = 600.0
    """How long workers that come are waited for, and GPUs that may become fit (``join_timeout``)."""
    repair_patience_s: float = 0.0
    """How long other hardware is waited for (``--wait-for-hardware``)."""
    provider: ProviderNow | None = None
    absorbs: int = 0
    """How often this step was done again in place already."""
    recoveries: int = 0
    """So far in this job."""
    costs: Costs = Costs()

    @property
    def comes_by_itself(self) -> bool:
        """No hardware has to come or to come back before all lost ranks can be taken over."""
        return self.coming + self.hoped >= self.short

    @property
    def checkpoint(self) -> bool:
        """There is one on disk."""
        return self.costs.checkpoint_age_s is not None


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """What one rung would mean now."""

    rung: Rung
    why_not: str = ""
    """Why it is impossible; "": it is possible."""
    cost_gpu_s: float = 0.0
    """Predicted, weighted. 0 where it is impossible."""
    figures: dict[str, float] = {}
    """What that was made of: seconds for all ranks (``*_s``), and weighted GPU-seconds (``*_gpu_s``)."""
    meanwhile: Literal["", "wait", "train"] = ""
    """Of `Rung.ACQUIRE`: which of the two this is, the cheaper one unless the other was asked for."""

    @property
    def possible(self) -> bool:
        return not self.why_not


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done. A user's policy gives the rung, and a reason for people; all else is filled in."""

    rung: Rung
    reason: str = ""
    targets: dict[Rank, SlotId] = {}
    """Who takes which rank over. {}: as `ClusterView.takeovers`, which is the only other thing that is possible."""
    deadline_s: float = 0.0
    """Of a wait, from now; 0: as long as is allowed."""
    meanwhile: Literal["", "wait", "train"] = ""
    """Of `Rung.ACQUIRE`: until the rack has come all stand still, or go on without the lost ranks, as after a shrink. "": what costs
    less."""
    cost_gpu_s: float = 0.0
    """Predicted."""
    figures: dict[str, float] = {}
    options: tuple[Option, ...] = ()
    """All rungs, as they were seen."""
    by: str = "default"
    """Or ``order`` (a list of rungs), ``user`` (a function), ``rule`` (there was no choice)."""

    @property
    def is_last(self) -> bool:
        """Nothing but a stop is possible."""
        return not any(option.possible for option in self.options if option.rung is not Rung.STOP)
