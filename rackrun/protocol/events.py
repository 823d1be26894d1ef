"""What happened: the only way in which the core learns of the world.

Agents and workers send these very objects over the wire (`rackrun.protocol.wire`), so there is one definition of each. The
sender leaves ``at_ms`` at 0; the coordinator stamps it with its own monotonic clock on arrival, because two hosts'
clocks are never compared. An event of an incarnation that is no longer current is ignored by the core.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rackrun.protocol.gpu_health import Verdict
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.policy_types import Decision

__all__ = [
    "BatchChanged",
    "BreakerClosed",
    "CollectiveWait",
    "CostsMeasured",
    "DepartureAnnounced",
    "DeviceChecked",
    "DeviceJudged",
    "DrainRequested",
    "Event",
    "Failure",
    "GrowRequested",
    "JobEvent",
    "JournalFailed",
    "LossNotRepeated",
    "OfWorker",
    "PolicyAnswered",
    "RackDelivered",
    "RackPreempted",
    "RackRefused",
    "PolicyRequested",
    "ReplicasDiffer",
    "ReturnRequested",
    "ShrinkRequested",
    "SlowRank",
    "SlowRanksChanged",
    "SnapshotMirrored",
    "SnapshotStriped",
    "StopRequested",
    "SwapRequested",
    "TimerFired",
    "TrayDescribed",
    "TrayJoined",
    "TrayLost",
    "WorkerBusy",
    "WorkerElastic",
    "WorkerEvent",
    "WorkerExited",
    "WorkerFinished",
    "WorkerParked",
    "WorkerPaused",
    "WorkerReady",
    "WorkerResumed",
    "WorkerSevered",
    "WorkerStalled",
    "WorkerUnbuilt",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event", gc=False):
    at_ms: int = 0


class OfWorker(_Event, frozen=True, kw_only=True):
    """All that one worker, or its agent, says of it: `WorkerEvent` lists them."""

    slot: SlotId
    incarnation: Incarnation


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A Python exception that ended a worker's script."""

    type: str
    """Qualified name, such as ``builtins.ValueError``."""
    message: str
    traceback: str
    where: str
    """``file:line`` of the innermost frame: with ``type`` it tells the same bug on two ranks."""


class TrayJoined(_Event, frozen=True, kw_only=True):
    """An agent connected. Its slots are empty: whatever ran there before is dead."""

    tray: TrayId
    host: str
    slots: int
    store: str
    """``host:port`` of the tray's exchange (`rackrun.link.exchange`), over which workers may build groups."""
    snapshots: str
    """``host:port`` where the tray serves the snapshots that it keeps."""
    topology: bytes = b""
    """What is known of this tray: a `rackrun.topology.sources.partial_topology.PartialTopology` for each source, as a JSON list; empty: nothing."""
    codec: bool = False
    """Reed-Solomon's codec is installed there (`rackrun.checkpoint.redundancy.isal`)."""
    unfit: dict[int, tuple[str, ...]] = {}
    """Slots whose GPU must not be used now, by index, and why not (`rackrun.topology.health.findings.preflight`)."""
    unjudged: str = ""
    """What of its GPUs is not judged, and why (`rackrun.topology.health.ignored_checks`); "": all is."""


class TrayDescribed(_Event, frozen=True, kw_only=True):
    """A tray whose driver was silent when it joined knows now what it is."""

    tray: TrayId
    topology: bytes
    """`TrayJoined.topology`."""


class TrayLost(_Event, frozen=True, kw_only=True):
    """The agent is gone, and with it (by PR_SET_PDEATHSIG, or by fencing) all its workers."""

    tray: TrayId
    because: str
    returns: bool = False
    """Its launcher starts it again: the tray joins in some seconds, all slots empty."""


class DeviceJudged(_Event, frozen=True, kw_only=True):
    """The health of a tray's GPU has changed, or its process is to be started again."""

    tray: TrayId
    verdict: Verdict


class DeviceChecked(_Event, frozen=True, kw_only=True):
    """Whether the GPU of a slot may be used by who is not using it yet has changed."""

    tray: TrayId
    index: int
    unfit: tuple[str, ...]
    """Why not; empty: it may."""


class WorkerElastic(OfWorker, frozen=True, kw_only=True):
    """The script entered ``@rackrun.elastic``. Until the first of these a job is taken for a plain torchrun script."""


class WorkerReady(OfWorker, frozen=True, kw_only=True):
    """The worker stands at ``run.steps()``: a rank begins with step 0, a spare waits."""

    replica_class: str = ""
    """Equal on ranks whose large state is the same (data-parallel replicas). "" when unknown, as for a spare."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of ``@rackrun.elastic(mesh=...)``, in order, none of them open; () when the script names none."""
    fixed: str = "it has not said that it can"
    """Why the number of ranks cannot change under this worker; "" when it can."""
    reenters: bool = False
    """It changes by entering ``main`` again (`rackrun.protocol.commands.Reshard`), not in place."""
    exact: bool = False
    """What it computes does not depend on the number of ranks (``reduction="exact"``)."""
    shards: int = 0
    """Micro-batches of the global batch; 0: it has not said."""
    setup_ms: int = -1
    """How long it took from the beginning of ``main`` to ``run.steps()``. -1: not known."""
    numerics: tuple[tuple[str, str], ...] = ()
    """What its bits depend on beside the script (`rackrun.worker.device.numerics`); (): it has not said."""


class WorkerParked(OfWorker, frozen=True, kw_only=True):
    """Answer to BreakGeneration: all collectives of this worker are broken, and its part in the verdict is fixed."""

    generation: Generation
    """The one that is to come: BreakGeneration.generation."""
    passed: Position = BEGIN
    """The last unit whose gate this worker saw pass: it is committed, whoever else knows."""
    entered: Position = BEGIN
    """The last unit whose gate it entered (``passed``, or the one after it)."""
    gate: tuple[float, ...] = ()
    """What the gate of ``passed`` reduced to (loss, sample count, digest): others may have missed it."""
    snapshots: tuple[Step, ...] = ()
    """Sealed snapshots of this worker's own shards that its agent keeps (`rackrun.protocol.ids.snapshot_id`), oldest first."""
    layout: Generation | None = Generation(0)
    """Of the state that is in its memory; None: it has none, because it is entering ``main`` again."""
    replica_class: str = ""
    resumed: Generation = Generation(0)
    """The newest generation in which it got the state that it has, and told all that it knew. 0: it has its own, or none."""
    good: Position | None = None
    """The last unit after which it knows all replicas to have been equal (``--check-replicas``)."""


class WorkerResumed(OfWorker, frozen=True, kw_only=True):
    """Groups are built and state is in place: this worker computes again, in ``generation``."""

    generation: Generation


class WorkerPaused(OfWorker, frozen=True, kw_only=True):
    """Answer to PauseWorkers: it stands between two units, the same as everybody, and waits for the next generation. What it needs
    a snapshot for has one of exactly the last unit, sealed."""

    generation: Generation


class WorkerSevered(OfWorker, frozen=True, kw_only=True):
    """A collective of ``generation`` failed under this worker a while ago, and no BreakGeneration has told it why: a
    connection broke between ranks that are alive, or a peer is lost that nobody has missed yet."""

    generation: Generation
    because: str


class WorkerUnbuilt(OfWorker, frozen=True, kw_only=True):
    """It could not build the groups of ``generation``, and waits for another one."""

    generation: Generation
    cut_off: bool
    """It did not even reach the exchange, where all meet. Else it did, and somebody did not come, or not through."""
    because: str


class CollectiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's main thread, in a step or a phase, is blocked in a collective until all members of its group have called that, and until then
    the rank calls no other one. What `rackrun.core.faults.deadlock` goes by."""

    generation: Generation
    group: int
    """As in ``called``."""
    number: int
    """The collective is the ``number``-th that this rank has called in the group, in this generation."""
    called: tuple[tuple[int, int], ...]
    """For each group of this rank, one number that all members know it by, and how many collectives this rank has called there. Sends and
    receives are not among them."""


class WorkerStalled(OfWorker, frozen=True, kw_only=True):
    """No progress for longer than the unit that it is in may take."""

    step: Step
    collective: int
    """How many collectives it has entered since the generation began: the lowest count is to blame."""
    silent: bool
    """Not even its control thread ticks: stopped, or holding the GIL. Blame needs no comparison."""
    for_ms: int
    waiting: bool = False
    """In a collective, for others. Else it stands in its own code."""
    over: bool = False
    """It goes on after all: what was told before does not hold any more."""
    phase: int = 0
    """Of ``step``: `Position.phase`."""
    unit: str = ""
    """What it is in, for people: ``phase evaluate (run.every(100, ...)) after step 200``."""
    where: str = ""
    """Its line: ``train.py:31 in evaluate``."""
    allowed_ms: int = 0
    """For so long it may be without progress there."""
    early: bool = False
    """Its limit is not over. It waits (``waiting``) while another rank may hang, or it is idle where its own history says too little: the
    other ranks' times may show that it hangs. An idle rank says so again every few seconds, as long as it is idle."""
    took_ms: int = -1
    """Of a rank that waits: how long its own code took, from the end of the last collective to this one. -1: not known."""
    blocked: CollectiveWait | None = None
    """Of a rank that waits: for certain it can do nothing else. None: that is not known."""


class WorkerBusy(OfWorker, frozen=True, kw_only=True):
    """It is in its own code for long, and is seen to work there. If it stands still, `WorkerStalled` says so."""

    unit: str
    where: str
    for_ms: int
    allowed_ms: int
    """So long it may be without progress, as long as it works."""
    awaited: bool
    """All are called to another generation, and it has not come yet. Told again and again."""


class WorkerExited(OfWorker, frozen=True, kw_only=True):
    """The process has ended, or is beyond recall (the kernel is tearing it down)."""

    exit_code: int | None = None
    signal: int | None = None
    failure: Failure | None = None
    early: bool = False
    """The script failed before it had made a process group: other ranks have no part in it."""
    step: Step = Step(-1)
    """The step it was in, read from its heartbeat page."""
    snapshots: tuple[Step, ...] = ()
    """Sealed snapshots of it that its agent keeps, oldest first."""


class WorkerFinished(OfWorker, frozen=True, kw_only=True):
    """``main`` has returned on this rank; it waits, its state intact, until all have."""

    took_ms: int = -1
    """How long its own code took, from the end of the last collective to its return. -1: not known."""


class BatchChanged(OfWorker, frozen=True, kw_only=True):
    """A step was committed whose global batch is not that of the step before (``batch="scale_lr"``). Every rank says so."""

    step: Step
    batch: int
    """Samples."""
    full_batch: int
    factor: float
    """Of all learning rates, in this step."""
    target: float
    """The same once it has risen."""
    rule: str


class SnapshotMirrored(OfWorker, frozen=True, kw_only=True):
    """Another tray keeps verified copies of this worker's snapshots."""

    generation: Generation
    """In which the newest of them was taken."""
    holder: TrayId
    where: str
    """``host:port/slot/incarnation`` of the holder's agent."""
    steps: tuple[Step, ...]
    """All that it keeps of this worker now, oldest first."""


class SnapshotDamaged(OfWorker, frozen=True, kw_only=True):
    """A snapshot from which this worker was to be restored does not match its checksums; nothing of it was used."""

    generation: Generation
    step: Step
    where: str
    """`Restore.snapshot`, or the row of the first of `Restore.rebuild`; "": this worker's own."""
    because: str


class SnapshotStriped(OfWorker, frozen=True, kw_only=True):
    """All keepers of this worker's set have its stripes of a snapshot in their rows, verified."""

    generation: Generation
    """Whose plan has the set."""
    step: Step
    besides: Step = Step(-1)
    """The only other step of which keepers keep rows from now on; -1: nothing is dropped."""


class ReplicasDiffer(OfWorker, frozen=True, kw_only=True):
    """Ranks that should hold the same state do not (``--check-replicas``). All ranks come to the same conclusion, tell it, and wait at
    the gate until their generation is broken."""

    generation: Generation
    at: Position
    """The step at whose gate it was seen; nobody has passed that."""
    culprits: tuple[Rank, ...]
    """Who is wrong; (): nobody can say, and the steps since ``good`` are to be computed once more."""
    good: Position
    """No state of later than this is to be trusted, whoever holds it; `BEGIN`: none is known to be good."""
    again: bool = False
    """These steps have been computed twice, and still nobody can say."""
    differing: tuple[Rank, ...] = ()
    """Then: all ranks of which some are wrong."""


class LossNotRepeated(OfWorker, frozen=True, kw_only=True):
    """This rank's part of the loss was inf or NaN, and was finite when all computed the step once more (``--nan-probation``)."""

    at: Position


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that others wait for, step after step."""

    rank: Rank
    slot: SlotId
    times: float
    """Its own time over that of its peers, for the same work."""
    own_ms: float
    """Of a step, or a micro-batch of it: the median of the window."""
    past: float
    """The same over its own best; 0 when it has none. Near 1: it has always been so."""
    rows: int
    """So many rows of the window it was behind in."""
    window: int


class SlowRanksChanged(_Event, frozen=True, kw_only=True):
    """Other ranks are slow than before (`rackrun.core.stragglers.straggler_detection`), in the generation that trains."""

    generation: Generation
    slow: tuple[SlowRank, ...]
    """All that are, by rank."""
    everybody: float = 0.0
    """All take so many times as long as they once did; 0: they do not."""
    rest: float = 0.0
    """What a step costs a rank beside its micro-batches, in micro-batches."""
    meets: bool = False
    """Ranks with different samples meet in collectives of each micro-batch: all have to have as many."""


class TimerFired(_Event, frozen=True, kw_only=True):
    name: str


class BreakerClosed(_Event, frozen=True, kw_only=True):
    """A person has looked at what the circuit breaker holds back, and wants it to be acted on (``rackctl close-breaker``)."""


class CostsMeasured(_Event, frozen=True, kw_only=True):
    """What the coordinator has measured that the core sees nothing of; told when it has changed enough to matter."""

    step_s: float | None = None
    copy_bytes_per_s: float | None = None
    state_bytes: float | None = None
    """Of one rank."""
    checkpoint: Step | None = None
    """The newest step that is on disk."""
    checkpoint_every_s: float | None = None


class PolicyAnswered(_Event, frozen=True, kw_only=True):
    """Answer to AskPolicy. Whether it is possible is for the core to say."""

    question: int
    decision: Decision | None = None
    """None: the user's function leaves it to the default, or see ``trouble``."""
    trouble: str = ""
    """It raised, returned something else, or took too long."""


class RackDelivered(_Event, frozen=True, kw_only=True):
    """The provider says that a rack is there: its agents have joined, or will."""

    request: int
    """`RequestRack.request`"""
    trays: tuple[TrayId, ...]
    """Under these names."""


class RackRefused(_Event, frozen=True, kw_only=True):
    """Nothing comes of a request: the provider says no, or it failed. Of a rack that is there already: nobody looks after it any more."""

    request: int
    because: str
    failed: bool = False
    """It raised, or its process ended: something of the rack may be there, and is to be released."""


class RackPreempted(_Event, frozen=True, kw_only=True):
    """The provider takes a rack back before long."""

    request: int
    because: str
    trays: tuple[TrayId, ...] = ()
    """These of it; (): all."""


class DrainRequested(_Event, frozen=True, kw_only=True):
    """A person wants nobody on a tray or a slot (``rackctl drain``)."""

    request: str
    """Its name, which every `Answer` to it bears."""
    target: str
    because: str = ""
    wait: bool = False
    """For spares, if there are not enough now."""
    steps: int = 0
    """Committed since this coordinator began, as it is told."""


class ReturnRequested(_Event, frozen=True, kw_only=True):
    """A drained tray or slot may be used again (``rackctl return``)."""

    request: str
    target: str


class SwapRequested(_Event, frozen=True, kw_only=True):
    """A person wants a rank to go to a spare (``rackctl swap``)."""

    request: str
    rank: Rank
    to: str = ""
    """A spare's slot; "": the best one."""
    steps: int = 0
    """`DrainRequested.steps`"""


class ShrinkRequested(_Event, frozen=True, kw_only=True):
    """A person wants fewer ranks (``rackctl shrink``), for as long as nobody asks for more."""

    request: str
    ranks: tuple[Rank, ...] = ()
    """Who is to go, whoever has to go with them. (): see ``to``."""
    to: int = 0
    """So many are to stay, whichever."""
    steps: int = 0
    """`DrainRequested.steps`"""


class GrowRequested(_Event, frozen=True, kw_only=True):
    """The world may have more ranks again (``rackctl grow``)."""

    request: str
    to: int = 0
    """0: as many as it began with."""


class PolicyRequested(_Event, frozen=True, kw_only=True):
    """Failures are to be answered otherwise from now on (``rackctl policy``)."""

    request: str
    policy: str | None = None
    """As ``--policy``; None: as it is."""
    weights: str | None = None
    """As ``--policy-weights``; None: as they are."""
    trouble: str = ""
    """Why the function that it names cannot be asked: it was loaded once."""


class DepartureAnnounced(_Event, frozen=True, kw_only=True):
    """A tray's agent has been told to leave, as a scheduler gives notice. It goes when it is dismissed, or when its grace is over."""

    tray: TrayId
    because: str
    exit_code: int
    """Of the job, if no other tray stays."""


class StopRequested(_Event, frozen=True, kw_only=True):
    """A person or the scheduler wants the job to end at the next step boundary (Ctrl-C, SIGTERM, ``rackctl``)."""

    because: str
    exit_code: int


class JournalFailed(_Event, frozen=True, kw_only=True):
    """A generation could not be persisted, so it must not be announced."""

    because: str


WorkerEvent: TypeAlias = (
    WorkerElastic
    | WorkerReady
    | WorkerParked
    | WorkerResumed
    | WorkerPaused
    | WorkerSevered
    | WorkerUnbuilt
    | WorkerStalled
    | WorkerBusy
    | WorkerExited
    | WorkerFinished
    | BatchChanged
    | ReplicasDiffer
    | LossNotRepeated
    | SnapshotMirrored
    | SnapshotDamaged
    | SnapshotStriped
)
JobEvent: TypeAlias = (
    TrayJoined
    | TrayDescribed
    | TrayLost
    | DeviceJudged
    | DeviceChecked
    | BreakerClosed
    | DrainRequested
    | ReturnRequested
    | SwapRequested
    | ShrinkRequested
    | GrowRequested
    | PolicyRequested
    | DepartureAnnounced
    | SlowRanksChanged
    | TimerFired
    | CostsMeasured
    | PolicyAnswered
    | RackDelivered
    | RackRefused
    | RackPreempted
    | StopRequested
    | JournalFailed
)
"""Of everything else: trays, timers, people, the provider, and the coordinator itself."""
Event: TypeAlias = WorkerEvent | JobEvent
