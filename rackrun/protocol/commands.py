"""Commands: the only way in which the core acts on the world.

The coordinator's shell carries out commands in order. A command to a worker is forwarded by its agent unchanged.
*Persist before send*: `BreakGeneration` and `ResumeGeneration` are in the journal, on disk, before they are sent. If
writing the journal fails, the shell sends nothing and answers with `JournalFailed`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rackrun.protocol import policy_types
from rackrun.protocol.events import ScriptFailure
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.timers import Timer

__all__ = [
    "Answer",
    "AskPolicy",
    "BreakGeneration",
    "Command",
    "CondemnWorker",
    "DealShards",
    "Decided",
    "DismissTray",
    "DrainWorkers",
    "FenceWorker",
    "Keeper",
    "Member",
    "Notice",
    "PauseWorkers",
    "GenerationPlan",
    "Refusal",
    "ReleaseRack",
    "ReleaseWorkers",
    "RequestRack",
    "Restore",
    "Reshard",
    "ResumeGeneration",
    "SetTimer",
    "StartWorker",
    "StopJob",
    "Stripes",
    "Worker",
    "WorkerCommand",
]


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="command", gc=False):
    pass


class Worker(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One worker process: its slot, and which start of a process in the job it is."""

    slot: SlotId
    incarnation: Incarnation


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank of a generation and the worker process that holds it."""

    rank: Rank
    slot: SlotId
    incarnation: Incarnation
    fresh: bool = False
    """Whether it joins in this generation, without state."""


class Keeper(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a set, and the agent of its tray, which keeps parity for the other members."""

    rank: Rank
    tray: TrayId
    address: str
    """``host:port`` of the tray's agent."""


class Stripes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one surviving member of a set provides to rebuild another member's snapshot."""

    rank: Rank
    row: str
    """``host:port/generation/rank`` of the agent that keeps this member's part of the parity."""
    snapshot: str
    """``host:port/slot/incarnation`` of the agent that keeps this member's own snapshot."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the state of one fresh member comes from."""

    rank: Rank
    sources: tuple[Rank, ...] = ()
    """Live members of the same replica class, all clean at ``GenerationPlan.committed``. Empty: the state comes from
    snapshots."""
    snapshot: str = ""
    """``host:port/slot/incarnation`` of the agent that keeps the lost rank's snapshot. The snapshot is that of
    ``GenerationPlan.rollback`` if set, else that of ``GenerationPlan.committed``."""
    rebuild: tuple[Stripes, ...] = ()
    """The surviving members of the lost rank's set, if no agent keeps the rank's snapshot itself."""
    members: tuple[Rank, ...] = ()
    """All members of that set, in the set's order, lost ones included."""
    parity: int = 1
    """Number of members of the set that may be lost at once."""


class Reshard(msgspec.Struct, frozen=True, kw_only=True):
    """Instruction to enter ``main`` again in the same processes, as a world of another size.

    Each rank fills its state from what the old ranks had at the end of ``GenerationPlan.committed``, and takes a snapshot of it
    in the new layout before it reports that it has resumed.
    """

    layout: Generation
    """The old layout. The snapshot's id is `snapshot_id` of this layout and ``GenerationPlan.committed.step``. A worker that
    stands after that step and is named in ``images`` seals that snapshot first."""
    images: tuple[str, ...]
    """For each old rank, ``host:port/slot/incarnation`` of the agent that keeps its snapshot."""


class GenerationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker needs to go on in a new generation."""

    generation: Generation
    world_size: int
    members: tuple[Member, ...]
    """The members, ordered by rank."""
    store: str
    """``host:port`` of the exchange over which this generation's groups are built. The names of the exchange's rooms
    contain the generation."""
    committed: Position = BEGIN
    """The last committed unit. A worker that entered its gate without seeing it pass applies it now; a worker that
    entered a later gate discards that later unit. The next unit runs after ``committed``."""
    gate: tuple[float, ...] = ()
    """The reduced values of the gate of ``committed``, for workers that missed them."""
    restores: tuple[Restore, ...] = ()
    """One entry for each fresh member; empty in the first generation."""
    mirrors: dict[TrayId, str] = {}
    """For each tray, the agent of another tray (``host:port/tray``) to which it copies its workers' snapshots. Empty if
    there is one tray."""
    sets: tuple[tuple[Keeper, ...], ...] = ()
    """Sets of ranks, used instead of mirrors. Each member's agent keeps parity of the other members' snapshots."""
    parity: int = 1
    """Number of members of a set that may be lost at once."""
    rollback: Step | None = None
    """The step whose snapshot every rank returns to, because a shard had no live copy. The steps from here to
    ``committed`` are computed again, with the same bits, but are committed once. None: no rollback."""
    anew: bool = False
    """Whether the steps after ``rollback`` were wrong (`ReplicasDiffer`), so that computing them again gives other
    bits."""
    layout: Generation
    """The layout of all snapshots from here on."""
    reshard: Reshard | None = None
    """Set if the ranks enter ``main`` again as a world of another size."""
    full: int
    """Number of ranks with which the job began."""
    worlds: tuple[tuple[Step, int], ...] = ()
    """Pairs (step, number of ranks): from each of these steps on, a world of that size commits the steps that no
    earlier world committed. A step that is computed again belongs to the world that committed it first."""
    shares: tuple[int, ...] = ()
    """Micro-batches per step of each data-parallel rank, by its index; (): as even as possible. Deals (`DealShards`) of
    this generation change these shares."""


class SetTimer(_Command, frozen=True, kw_only=True):
    """Request a `TimerFired` with this timer at ``at_ms``. Timers are never cancelled; the core ignores one that is no
    longer needed."""

    timer: Timer
    at_ms: int


class StartWorker(_Command, frozen=True, kw_only=True):
    """Fork a worker in an empty slot."""

    slot: SlotId
    incarnation: Incarnation
    spare: bool
    """Whether it is a spare: it runs the script on loopback groups with a provisional rank and waits at
    ``run.steps()``."""
    rank: Rank
    world_size: int
    generation: Generation
    store: str
    """``host:port`` of the exchange over which agents agree on MASTER_ADDR and MASTER_PORT. Each restart has a new
    TCPStore."""
    restarts: int = 0
    """Value of TORCHELASTIC_RESTART_COUNT."""


class CondemnWorker(_Command, frozen=True, kw_only=True):
    """Count a living member as lost from now on.

    `FenceWorker` follows when the other members have left the generation, unless the worker exits before. Until then it
    may share GPU memory with them (`rackrun.core.recovery.fencing`).
    """

    slot: SlotId
    incarnation: Incarnation
    because: str
    fault: bool = False
    """As `FenceWorker.fault`."""


class FenceWorker(_Command, frozen=True, kw_only=True):
    """Kill a worker with SIGKILL. Its `WorkerExited` follows."""

    slot: SlotId
    incarnation: Incarnation
    because: str
    fault: bool = False
    """Whether the worker hung or did not answer in time. This counts against its slot."""
    swept_along: bool = False
    """Whether the worker is ended only because the whole world restarts or its replica is dropped. This does not count
    against it."""


class BreakGeneration(_Command, frozen=True, kw_only=True):
    """End every collective of the older generation on these workers. Each answers with `WorkerParked`."""

    generation: Generation
    """The generation that comes next."""
    workers: tuple[Worker, ...]
    because: str


class ResumeGeneration(_Command, frozen=True, kw_only=True):
    """Build the groups of the new generation, restore missing state and go on. Each member answers with
    `WorkerResumed`."""

    plan: GenerationPlan
    because: str
    protected: str = ""
    """A description of the losses that the snapshots survive in this generation, and of the cost; "" with one tray."""


class PauseWorkers(_Command, frozen=True, kw_only=True):
    """Stop all workers between two units, after the same step, with a sealed snapshot of it where one would be needed.

    Each answers with `WorkerPaused`. Only the next generation ends the pause. A worker that is in another generation by
    then ignores the command.
    """

    generation: Generation
    """The present generation."""
    workers: tuple[Worker, ...]
    because: str


class DealShards(_Command, frozen=True, kw_only=True):
    """Change how many micro-batches each rank computes in a step.

    The change takes effect when the gate of a step shows that all ranks know it. There is no answer. A worker that is
    in another generation by then ignores the command, because its plan has the same shares.
    """

    generation: Generation
    """The present generation."""
    number: int
    """Number of this deal within the generation, from 1."""
    shares: tuple[int, ...]
    """As `GenerationPlan.shares`."""
    workers: tuple[Worker, ...]
    because: str


class DrainWorkers(_Command, frozen=True, kw_only=True):
    """Leave the step loop at the next step boundary, all workers at the same one."""

    workers: tuple[Worker, ...]
    because: str


class ReleaseWorkers(_Command, frozen=True, kw_only=True):
    """Let workers return from ``main`` and exit, because every rank has finished."""

    workers: tuple[Worker, ...]


class DismissTray(_Command, frozen=True, kw_only=True):
    """Tell a departing tray's agent that its tray is no longer needed."""

    tray: TrayId
    because: str


Refusal: TypeAlias = Literal["", "unknown", "over", "plain", "policy", "early", "spares", "taken", "unfit", "size"]


class Answer(_Command, frozen=True, kw_only=True):
    """Answer to an operator's request (``rackctl drain``, ``shrink``, ...). It is also sent to clients that follow the
    job."""

    request: str
    outcome: Literal["begun", "done", "refused"]
    """``begun`` is followed by another answer, unless the job ends before."""
    text: str
    refusal: Refusal = ""
    remedy: str = ""
    drained: dict[SlotId, str] = {}
    """All slots that are out of use from now on, each with the reason."""
    departing: dict[TrayId, str] = {}
    """All trays whose agents have been told to leave, each with the reason."""
    forgiven: tuple[SlotId, ...] = ()
    """Slots whose earlier losses or slowness no longer count."""


class Notice(_Command, frozen=True, kw_only=True):
    """A message for people. It has no other effect."""

    text: str
    of_hold: bool = False
    """Whether it says what is missing in a hold, and what ends it."""


class Decided(_Command, frozen=True, kw_only=True):
    """The answer that was chosen for a failure, with its reason and cost. It is for the report and has no other
    effect."""

    generation: Generation
    """The generation that comes next."""
    failure: policy_types.Failure
    decision: policy_types.Decision


class AskPolicy(_Command, frozen=True, kw_only=True):
    """Call the user's policy function. `PolicyAnswered` follows, also if the function raises or takes too long."""

    question: int
    function: str
    """``module:function``"""
    failure: policy_types.Failure
    view: policy_types.ClusterView


class RequestRack(_Command, frozen=True, kw_only=True):
    """Ask the provider for a rack. `RackDelivered` or `RackRefused` may follow at any time, or never. `ReleaseRack`
    withdraws the request."""

    request: int
    """Number of the request in the job, from 1."""
    trays: int
    slots: int
    """Slots of each tray."""
    because: str


class ReleaseRack(_Command, frozen=True, kw_only=True):
    """Tell the provider to take a requested rack back, whether it has come or not. At the end of the job all racks are
    released without this command."""

    request: int
    because: str


class StopJob(_Command, frozen=True, kw_only=True):
    """End the job. Agents end every worker, and the launcher exits with ``exit_code``.

    0: done. 1: the script failed. 2: bad usage. 3: the job could not begin or go on, through no fault of the script.
    Others, such as 130 and 143, come from the request to stop (`StopRequested`).
    """

    exit_code: int
    because: str
    remedy: str = ""
    failure: ScriptFailure | None = None
    rank: Rank | None = None


WorkerCommand: TypeAlias = (
    StartWorker
    | FenceWorker
    | BreakGeneration
    | ResumeGeneration
    | PauseWorkers
    | DealShards
    | DrainWorkers
    | ReleaseWorkers
    | DismissTray
    | StopJob
)
Command: TypeAlias = (
    WorkerCommand | SetTimer | Notice | Answer | Decided | AskPolicy | RequestRack | ReleaseRack | CondemnWorker
)
