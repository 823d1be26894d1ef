"""What to do: the only way in which the core changes the world.

The coordinator's shell carries each command out, in order; what addresses a worker travels as it is, over the agent, to
the worker. *Persist before send*: `BreakGeneration` and `ResumeGeneration` are in the journal, on disk, before anyone
is told; if that fails the shell sends nothing and answers with `JournalFailed`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rackrun.protocol import policy_types
from rackrun.protocol.events import Failure
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, TrayId

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
    "Plan",
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
    """One process: the place it runs in, and which start of it."""

    slot: SlotId
    incarnation: Incarnation


class Member(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    rank: Rank
    slot: SlotId
    incarnation: Incarnation
    fresh: bool = False
    """Joins in this generation, without state."""


class Keeper(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a set, and who keeps parity for it: the agent of its tray."""

    rank: Rank
    tray: TrayId
    address: str
    """``host:port`` of that agent."""


class Stripes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one member of a set gives when another's snapshot is rebuilt."""

    rank: Rank
    row: str
    """``host:port/generation/rank`` of the agent that keeps its part of the parity."""
    snapshot: str
    """``host:port/slot/incarnation`` of the agent that keeps its own snapshot."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a fresh member's state comes from."""

    rank: Rank
    sources: tuple[Rank, ...] = ()
    """Live members of the same replica class, all of them clean at ``Plan.committed``. Empty: from snapshots."""
    snapshot: str = ""
    """``host:port/slot/incarnation`` of the agent that keeps the lost rank's snapshot: of ``Plan.rollback``, or, without one, of ``Plan.committed``."""
    rebuild: tuple[Stripes, ...] = ()
    """The members of the lost rank's set that are left, where nobody has its snapshot itself."""
    members: tuple[Rank, ...] = ()
    """That set, in its order, the lost ones included."""
    parity: int = 1
    """So many of them may be lost."""


class Reshard(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks enter ``main`` again, in the same processes, as another number of them: each fills its state from what the old ranks
    had at the end of ``Plan.committed``, and takes a snapshot of that in the new layout before it says that it has resumed."""

    layout: Generation
    """The old one: `snapshot_id` of this and ``Plan.committed.step`` is the snapshot's id. Whoever stands after that step and is named
    below seals one first."""
    images: tuple[str, ...]
    """By old rank, ``host:port/slot/incarnation`` of the agent that keeps its snapshot."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs in order to go on in a generation."""

    generation: Generation
    world_size: int
    members: tuple[Member, ...]
    """In the order of their ranks."""
    store: str
    """``host:port`` of the exchange that this generation's groups are built over; rooms carry the generation."""
    committed: Position = BEGIN
    """The last unit that is committed. A worker that entered its gate without seeing it pass now applies it; one that
    entered a later gate discards it. The next unit runs after that."""
    gate: tuple[float, ...] = ()
    """What the gate of ``committed`` reduced to, for those who missed it."""
    restores: tuple[Restore, ...] = ()
    """One for each fresh member, unless this is the first generation."""
    mirrors: dict[TrayId, str] = {}
    """Tray -> the agent of another, as ``host:port/tray``, to which it copies its workers' snapshots. Empty with one tray."""
    sets: tuple[tuple[Keeper, ...], ...] = ()
    """Sets of ranks, instead of mirrors: each member's agent keeps parity of the others' snapshots."""
    parity: int = 1
    """Members of a set that may be lost at once."""
    rollback: Step | None = None
    """Everybody goes back to the snapshot taken right after this step: a shard with no live copy was lost. The steps
    from here to ``committed`` are computed again (the same bits), but are committed once."""
    anew: bool = False
    """What came after ``rollback`` was wrong (`ReplicasDiffer`): computed again it has other bits."""
    layout: Generation
    """Of all snapshots from here on."""
    reshard: Reshard | None = None
    full: int
    """Ranks of the world as it began."""
    worlds: tuple[tuple[Step, int], ...] = ()
    """(step, ranks): from each of these steps on, so many ranks commit, or will, what was not committed before. A step that is done
    again belongs to the world that has committed it first."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each data-parallel rank, by its place; (): as even as they go. Deals (`DealShards`) are counted from here."""


class SetTimer(_Command, frozen=True, kw_only=True):
    """`TimerFired` with this name comes back at ``at_ms``. A timer is never taken back: a late one is ignored."""

    name: str
    at_ms: int


class StartWorker(_Command, frozen=True, kw_only=True):
    """Fork a worker in an empty slot."""

    slot: SlotId
    incarnation: Incarnation
    spare: bool
    """A spare runs the script on loopback groups with a provisional rank, and waits at ``run.steps()``."""
    rank: Rank
    world_size: int
    generation: Generation
    store: str
    """``host:port`` of the exchange, over which agents agree on MASTER_ADDR and MASTER_PORT: a fresh TCPStore a restart."""
    restarts: int = 0
    """TORCHELASTIC_RESTART_COUNT."""


class CondemnWorker(_Command, frozen=True, kw_only=True):
    """A living member counts as lost from now on. `FenceWorker` follows when the others have left the generation, unless it ends before:
    it shares GPU memory with them (`rackrun.core.recovery.fencing`)."""

    slot: SlotId
    incarnation: Incarnation
    because: str
    fault: bool = False
    """As `FenceWorker.fault`."""


class FenceWorker(_Command, frozen=True, kw_only=True):
    """SIGKILL. Its `WorkerExited` comes back."""

    slot: SlotId
    incarnation: Incarnation
    because: str
    fault: bool = False
    """It hung, or did not answer in time: that counts against its slot."""
    swept_along: bool = False
    """The whole world starts again, or its replica is dropped; nothing is said against this one."""


class BreakGeneration(_Command, frozen=True, kw_only=True):
    """End every collective of the older generation on these workers; each answers with `WorkerParked`."""

    generation: Generation
    """The one that is to come."""
    workers: tuple[Worker, ...]
    because: str


class ResumeGeneration(_Command, frozen=True, kw_only=True):
    """Build the groups of the new generation, restore what is missing, go on. Each answers with `WorkerResumed`."""

    plan: Plan
    because: str
    protected: str = ""
    """What snapshots survive in this generation, and what that costs. "" with one tray."""


class PauseWorkers(_Command, frozen=True, kw_only=True):
    """Stop between two units, all after the same step, with a sealed snapshot of it where somebody would need one; each answers
    with `WorkerPaused`. Only the next generation ends the pause. Who is in another generation by then ignores it."""

    generation: Generation
    """The present one."""
    workers: tuple[Worker, ...]
    because: str


class DealShards(_Command, frozen=True, kw_only=True):
    """Share the micro-batches of a step out anew, once all ranks have heard of it: the gate of a step tells. Nobody answers. Who is
    in another generation by then ignores it: its plan says the same."""

    generation: Generation
    """The present one."""
    number: int
    """Of this deal in it, from 1."""
    shares: tuple[int, ...]
    """As `Plan.shares`."""
    workers: tuple[Worker, ...]
    because: str


class DrainWorkers(_Command, frozen=True, kw_only=True):
    """Leave the step loop at the next step boundary, all at the same one."""

    workers: tuple[Worker, ...]
    because: str


class ReleaseWorkers(_Command, frozen=True, kw_only=True):
    """Every rank has finished: workers may return from ``main`` and exit."""

    workers: tuple[Worker, ...]


class DismissTray(_Command, frozen=True, kw_only=True):
    """To an agent that was told to leave: nobody needs its tray any more."""

    tray: TrayId
    because: str


Refusal: TypeAlias = Literal["", "unknown", "over", "plain", "policy", "early", "spares", "taken", "unfit", "size"]


class Answer(_Command, frozen=True, kw_only=True):
    """To who asked for something (``rackctl drain``, ``shrink``, ...), and to who looks on."""

    request: str
    outcome: Literal["begun", "done", "refused"]
    """``begun`` is followed by another answer, unless the job ends before."""
    text: str
    refusal: Refusal = ""
    remedy: str = ""
    drained: dict[SlotId, str] = {}
    """All slots that nobody is to use from now on, and why."""
    departing: dict[TrayId, str] = {}
    """All trays that are told to leave."""
    forgiven: tuple[SlotId, ...] = ()
    """Slots whose losses, or slowness, do not count any more."""


class Notice(_Command, frozen=True, kw_only=True):
    """For a person to know; nothing else follows from it here."""

    text: str


class Decided(_Command, frozen=True, kw_only=True):
    """What is done about a failure, why, and at what cost. For the report: nothing else follows from it here."""

    generation: Generation
    """The one that is to come."""
    failure: policy_types.Failure
    decision: policy_types.Decision


class AskPolicy(_Command, frozen=True, kw_only=True):
    """Call the user's function. `PolicyAnswered` comes back, also when it raises or takes too long."""

    question: int
    function: str
    """``module:function``"""
    failure: policy_types.Failure
    view: policy_types.ClusterView


class RequestRack(_Command, frozen=True, kw_only=True):
    """Ask the provider for a rack. `RackDelivered` or `RackRefused` comes back, some time or never; `ReleaseRack` takes it back."""

    request: int
    """From 1 on, in the whole job."""
    trays: int
    slots: int
    """Of each tray."""
    because: str


class ReleaseRack(_Command, frozen=True, kw_only=True):
    """Nobody wants what was asked for any more, whether it has come or not: the provider is to take it back. At the end of the job all
    are released, without this."""

    request: int
    because: str


class StopJob(_Command, frozen=True, kw_only=True):
    """The end. Agents end every worker; the launcher exits with ``exit_code`` (0 done, 1 the script's, 3 ours)."""

    exit_code: int
    because: str
    remedy: str = ""
    failure: Failure | None = None
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
