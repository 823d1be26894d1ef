"""Events: the only way in which the core learns about the world.

Agents and workers send these same objects over the wire (`rackrun.protocol.wire`), so each event has one definition.
The sender leaves ``at_ms`` at 0, and the coordinator sets it from its own monotonic clock on arrival, because the
clocks of two hosts are never compared. The core ignores an event of an incarnation that is no longer current.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from rackrun.protocol.gpu_health import GpuVerdict
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.policy_types import Decision
from rackrun.protocol.timers import Timer

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
    "ScriptFailure",
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
    "SIGNAL_NAMES",
    "ReplicasDiffer",
    "ReturnRequested",
    "ShrinkRequested",
    "SlowRank",
    "SlowRanksChanged",
    "SnapshotDamaged",
    "SnapshotMirrored",
    "SnapshotStriped",
    "SourcesDiffer",
    "StopRequested",
    "SwapRequested",
    "TimerFired",
    "TrayDescribed",
    "TrayEvent",
    "TrayJoined",
    "TrayLost",
    "TrayStoodStill",
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

SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}
"""Names of the signals of Linux by which processes end. The module `signal` asks the operating system, which the core may
not do."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event", gc=False):
    shows_fault: ClassVar[Literal["no", "yes", "perhaps"]] = "no"
    """Whether a job notices by it that something is wrong. "perhaps": it also happens without a fault."""
    at_ms: int = 0

    @property
    def how(self) -> str:
        """What is wrong, in a few words; "": the event does not say it."""
        return str(getattr(self, "because", ""))


class OfWorker(_Event, frozen=True, kw_only=True):
    """An event about one worker, sent by the worker or by its agent. `WorkerEvent` lists all of them."""

    slot: SlotId
    incarnation: Incarnation


class ScriptFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A Python exception that ended a worker's script."""

    type: str
    """Qualified name, such as ``builtins.ValueError``."""
    message: str
    traceback: str
    where: str
    """``file:line`` of the innermost frame. Together with ``type`` it identifies the same bug on two ranks."""


class TrayJoined(_Event, frozen=True, kw_only=True):
    """An agent connected. Its slots are empty: every process that ran there before is dead."""

    tray: TrayId
    host: str
    slots: int
    store: str
    """``host:port`` of the tray's exchange (`rackrun.link.exchange`), over which workers may build groups."""
    snapshots: str
    """``host:port`` where the tray serves the snapshots that it keeps."""
    topology: bytes = b""
    """What is known about this tray: a JSON list with one `rackrun.topology.sources.partial_topology.PartialTopology`
    for each source. Empty: nothing is known."""
    codec: bool = False
    """Whether the Reed-Solomon codec is installed there (`rackrun.checkpoint.redundancy.isal`)."""
    unfit: dict[int, tuple[str, ...]] = {}
    """Slots, by index, whose GPU must not be used now, with the reasons
    (`rackrun.topology.health.findings.preflight`)."""
    unjudged: str = ""
    """Which GPU checks are ignored on this tray, and why (`rackrun.topology.health.ignored_checks`); "": none."""


class TrayDescribed(_Event, frozen=True, kw_only=True):
    """A tray whose GPU driver did not respond when the tray joined has now read its topology."""

    tray: TrayId
    topology: bytes
    """As `TrayJoined.topology`."""


class TrayLost(_Event, frozen=True, kw_only=True):
    """An agent is lost with all its workers, which die by PR_SET_PDEATHSIG or are fenced."""

    shows_fault = "yes"
    tray: TrayId
    because: str
    returns: bool = False
    """Whether the tray's launcher starts the agent again. The tray then joins again within seconds, with all slots
    empty."""


class TrayStoodStill(_Event, frozen=True, kw_only=True):
    """A tray's agent did not run for a while, without work of its own and without waiting for a processor.

    Either only the agent was stopped, or all processes of the tray stood still with it: the host was suspended,
    migrated or stalled by its hypervisor, or the processes were frozen. Not sent by an agent whose lease ended
    meanwhile: it is refused, and ends.
    """

    shows_fault = "perhaps"
    tray: TrayId
    for_ms: int
    """How long it did not run, in milliseconds, including the time in which the host was suspended."""
    workers_ran: bool | None = None
    """Whether the tray's workers ran meanwhile, by their heartbeat pages; None: that is not known."""

    @property
    def how(self) -> str:
        return f"its agent stood still{' alone' if self.workers_ran else ''} for {self.for_ms / 1e3:.1f} s"


class DeviceJudged(_Event, frozen=True, kw_only=True):
    """The health of a tray's GPU has changed, or the process on it has to be restarted."""

    shows_fault = "yes"
    tray: TrayId
    verdict: GpuVerdict

    @property
    def how(self) -> str:
        return f"GPU {self.verdict.index} is {self.verdict.health.value}: {self.verdict.reasons}"


class DeviceChecked(_Event, frozen=True, kw_only=True):
    """A slot's GPU has become fit, or unfit, for a worker that does not use it yet."""

    shows_fault = "perhaps"
    tray: TrayId
    index: int
    unfit: tuple[str, ...]
    """Why the GPU is unfit; (): it is fit."""

    @property
    def how(self) -> str:
        return f"GPU {self.index} is unfit: {'; '.join(self.unfit)}" if self.unfit else f"GPU {self.index} is fit"


class WorkerElastic(OfWorker, frozen=True, kw_only=True):
    """The script entered ``@rackrun.elastic``. Until the first of these events the job counts as a plain torchrun
    script."""


class WorkerReady(OfWorker, frozen=True, kw_only=True):
    """The worker has reached ``run.steps()``: a rank can begin with step 0, a spare waits."""

    replica_class: str = ""
    """Equal on ranks whose large state is the same (data-parallel replicas). "": unknown, as for a spare."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of ``@rackrun.elastic(mesh=...)``, in order, all sizes given; (): the script names no mesh."""
    fixed: str = "it has not said that it can"
    """Why the number of ranks cannot change under this worker; "": it can change."""
    reenters: bool = False
    """Whether the worker changes size by entering ``main`` again (`rackrun.protocol.commands.Reshard`) rather than in
    place."""
    exact: bool = False
    """Whether the worker's results are independent of the number of ranks (``reduction="exact"``)."""
    shards: int = 0
    """Micro-batches of the global batch; 0: not reported."""
    setup_ms: int = -1
    """Time from the beginning of ``main`` to ``run.steps()``, in milliseconds. -1: not known."""
    numerics: tuple[tuple[str, str], ...] = ()
    """Hardware, libraries and settings on which the worker's bits depend, besides the script
    (`rackrun.worker.device.numerics`); (): not reported."""


class WorkerParked(OfWorker, frozen=True, kw_only=True):
    """Answer to BreakGeneration: all collectives of this worker are broken, and its report of what it passed is
    final."""

    generation: Generation
    """The generation that comes next, as in BreakGeneration."""
    passed: Position = BEGIN
    """The last unit whose gate this worker saw pass. That unit is committed, even if no other worker saw it."""
    entered: Position = BEGIN
    """The last unit whose gate this worker entered: ``passed`` or the unit after it."""
    begun: Position = BEGIN
    """The unit that this worker began last, for the report: it is broken if it does not count."""
    gate: tuple[float, ...] = ()
    """The reduced values of the gate of ``passed`` (loss, sample count, digest), for workers that missed them."""
    snapshots: tuple[Step, ...] = ()
    """Sealed snapshots of this worker's own shards that its agent keeps, oldest first, as ids
    (`rackrun.protocol.ids.snapshot_id`)."""
    layout: Generation | None = Generation(0)
    """Layout of the state in the worker's memory. None: it has no state, because it is entering ``main`` again."""
    replica_class: str = ""
    resumed: Generation = Generation(0)
    """The newest generation in which the worker had its state in place (its own, or received in that generation), and
    all members had shared what they knew. 0: none so far."""
    good: Position | None = None
    """The last unit after which the worker knows that all replicas were equal (``--check-replicas``)."""


class WorkerResumed(OfWorker, frozen=True, kw_only=True):
    """The worker's groups are built and its state is in place: it computes again, in ``generation``."""

    generation: Generation


class WorkerPaused(OfWorker, frozen=True, kw_only=True):
    """Answer to PauseWorkers: the worker stands after the same unit as all others and waits for the next generation.

    A worker whose state needs a snapshot has a sealed one of exactly that unit.
    """

    generation: Generation


class WorkerSevered(OfWorker, frozen=True, kw_only=True):
    """A collective of ``generation`` failed on this worker a while ago, and no BreakGeneration has come since.

    Either a connection broke between ranks that are alive, or a peer died and nobody has noticed yet.
    """

    shows_fault = "yes"
    generation: Generation
    because: str


class WorkerUnbuilt(OfWorker, frozen=True, kw_only=True):
    """The worker could not build the groups of ``generation`` and waits for another generation."""

    generation: Generation
    cut_off: bool
    """Whether it could not even reach the exchange, where members meet. If it did reach the exchange, another member
    did not come, or could not be connected to."""
    because: str


class CollectiveWait(msgspec.Struct, frozen=True, kw_only=True):
    """The collective in which a rank's main thread is blocked, for `rackrun.core.faults.deadlock`.

    The main thread is in a step or a phase. It is blocked until all members of the group have called this collective,
    and until then it calls no other one.
    """

    generation: Generation
    group: int
    """The group's number, as in ``called``."""
    number: int
    """How many collectives this rank has called in the group in this generation, this one included."""
    called: tuple[tuple[int, int], ...]
    """For each group of this rank: a number that identifies the group on all its members, and how many collectives this
    rank has called in it. Sends and receives are not counted."""


class WorkerStalled(OfWorker, frozen=True, kw_only=True):
    """A worker made no progress for longer than its current unit may take."""

    shows_fault = "yes"
    step: Step
    collective: int
    """How many collectives the worker has entered since the generation began. The ranks with the lowest count are to
    blame."""
    silent: bool
    """Whether not even its control thread runs, because the process is stopped or its interpreter lock is held. Such a
    worker is to blame without any comparison."""
    for_ms: int
    waiting: bool = False
    """Whether it waits for others in a collective. Otherwise it is in its own code."""
    over: bool = False
    """Whether the worker makes progress again, so that its earlier report no longer holds."""
    phase: int = 0
    """The phase of ``step``, as `Position.phase`."""
    unit: str = ""
    """Description of its current unit, for people: ``phase evaluate (run.every(100, ...)) after step 200``."""
    where: str = ""
    """The line its main thread is at: ``train.py:31 in evaluate``."""
    allowed_ms: int = 0
    """How long it may be without progress there, in milliseconds."""
    early: bool = False
    """Whether the report comes before the worker's limit is over.

    Either it waits (``waiting``) while another rank may hang, or it is idle where its own history says too little, so
    that the other ranks' times may show that it hangs. An idle rank repeats this report every few seconds while it is
    idle.
    """
    took_ms: int = -1
    """For a waiting rank: milliseconds that its own code took, from the end of the previous collective to this one. -1:
    not known."""
    blocked: CollectiveWait | None = None
    """For a waiting rank: the collective without which it certainly cannot go on. None: not known."""

    @property
    def how(self) -> str:
        return f"no progress for {self.for_ms / 1e3:.1f} s"


class WorkerBusy(OfWorker, frozen=True, kw_only=True):
    """A worker has been in its own code for long and is seen to work there. If it stands still, `WorkerStalled` is sent
    instead."""

    unit: str
    where: str
    for_ms: int
    allowed_ms: int
    """How long it may be without progress while it works, in milliseconds."""
    awaited: bool
    """Whether all workers have been called to another generation and this one has not come yet. Sent repeatedly in that
    case."""


class WorkerExited(OfWorker, frozen=True, kw_only=True):
    """A worker's process has ended, or the kernel is already tearing it down."""

    shows_fault = "yes"
    exit_code: int | None = None
    signal: int | None = None
    failure: ScriptFailure | None = None
    early: bool = False
    """Whether the script failed before it had created a process group, so that other ranks had no part in the
    failure."""
    step: Step = Step(-1)
    """The step the worker was in, read from its heartbeat page."""
    snapshots: tuple[Step, ...] = ()
    """Sealed snapshots of this worker that its agent keeps, oldest first."""

    @property
    def how(self) -> str:
        if self.signal is not None:
            return SIGNAL_NAMES.get(self.signal, f"signal {self.signal}")
        if self.failure is not None:
            return self.failure.type.removeprefix("builtins.")
        return "gone" if self.exit_code is None else f"exit code {self.exit_code}"


class WorkerFinished(OfWorker, frozen=True, kw_only=True):
    """``main`` has returned on this rank. The worker waits with its state intact until all ranks have finished."""

    took_ms: int = -1
    """Milliseconds that its own code took, from the end of the last collective to its return. -1: not known."""


class BatchChanged(OfWorker, frozen=True, kw_only=True):
    """A step was committed whose global batch differs from that of the step before (``batch="scale_lr"``). Every rank
    sends it."""

    step: Step
    batch: int
    """Samples in the global batch."""
    full_batch: int
    factor: float
    """By what all learning rates are multiplied in this step."""
    target: float
    """The factor that is reached at the end of the warm-up."""
    rule: str


class SnapshotMirrored(OfWorker, frozen=True, kw_only=True):
    """Another tray keeps verified copies of this worker's snapshots."""

    generation: Generation
    """The generation in which the newest of the copied snapshots was taken."""
    holder: TrayId
    """The tray that keeps the copies."""
    where: str
    """``host:port/slot/incarnation`` of the holder's agent."""
    steps: tuple[Step, ...]
    """All snapshots of this worker that the holder keeps now, oldest first."""


class SnapshotDamaged(OfWorker, frozen=True, kw_only=True):
    """A snapshot from which this worker should have been restored does not match its checksums. None of it was used."""

    shows_fault = "yes"
    generation: Generation
    step: Step
    where: str
    """`Restore.snapshot`, or the row of the first of `Restore.rebuild`; "": the worker's own snapshot."""
    because: str


class SnapshotStriped(OfWorker, frozen=True, kw_only=True):
    """All keepers of this worker's set have its stripes of a snapshot in their rows, verified."""

    generation: Generation
    """The generation whose plan has the set."""
    step: Step
    besides: Step = Step(-1)
    """The only other step whose rows the keepers still keep; -1: no row is dropped."""


class SourcesDiffer(OfWorker, frozen=True, kw_only=True):
    """The live ranks from which this worker was to be restored do not have the same state. A worker says so once; the
    next time it exits."""

    shows_fault = "yes"
    generation: Generation
    because: str


class ReplicasDiffer(OfWorker, frozen=True, kw_only=True):
    """Ranks that should hold the same state do not (``--check-replicas``).

    All ranks reach the same conclusion and report it. They wait at the gate until their generation is broken.
    """

    shows_fault = "yes"
    generation: Generation
    at: Position
    """The step at whose gate the difference was found. No rank has passed that gate."""
    culprits: tuple[Rank, ...]
    """The ranks with wrong state. (): they cannot be determined, and the steps since ``good`` have to be computed
    again."""
    good: Position
    """The last trusted position: no state from after it is trusted, whichever rank holds it. `BEGIN`: no state is known
    to be good."""
    again: bool = False
    """Whether these steps have been computed twice and the wrong ranks still cannot be determined."""
    differing: tuple[Rank, ...] = ()
    """If ``again`` is set: all ranks among which some are wrong."""

    @property
    def how(self) -> str:
        wrong = f"wrong: {', '.join(map(str, self.culprits))}" if self.culprits else "nobody knows which are wrong"
        return f"replicas differ after step {self.at.step}; {wrong}"


class LossNotRepeated(OfWorker, frozen=True, kw_only=True):
    """This rank's part of the loss was inf or NaN, and was finite when all ranks computed the step again
    (``--nan-probation``)."""

    shows_fault = "yes"
    at: Position

    @property
    def how(self) -> str:
        return f"the loss of step {self.at.step} was inf or NaN only once"


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank for which others wait, step after step."""

    rank: Rank
    slot: SlotId
    times: float
    """The rank's own time divided by that of its peers, for the same work."""
    own_ms: float
    """Own time for a step, or for a micro-batch of it, in milliseconds: the median over the window."""
    past: float
    """Own time divided by the rank's own best; 0: it has no best yet. A value near 1 means that the rank has always
    been this slow."""
    rows: int
    """In how many rows of the window the rank was slower than its peers."""
    window: int
    """Number of rows in the window."""


class SlowRanksChanged(_Event, frozen=True, kw_only=True):
    """The set of slow ranks of the training generation has changed (`rackrun.core.stragglers.straggler_detection`)."""

    shows_fault = "perhaps"
    generation: Generation
    slow: tuple[SlowRank, ...]
    """All slow ranks, ordered by rank."""
    everybody: float = 0.0
    """Current time of the whole world divided by its former time; 0: the world as a whole is not slower."""
    rest: float = 0.0
    """What a step costs a rank besides its micro-batches, in units of one micro-batch."""
    meets: bool = False
    """Whether ranks with different samples take part in collectives of each micro-batch, so that all need the same
    number of micro-batches."""

    @property
    def how(self) -> str:
        return (
            ", ".join(f"rank {one.rank} takes {one.times:.2f} times as long" for one in self.slow) or "nobody is slow"
        )


class TimerFired(_Event, frozen=True, kw_only=True):
    """A timer that the core set (`SetTimer`) has expired."""

    timer: Timer


class BreakerClosed(_Event, frozen=True, kw_only=True):
    """An operator has looked at the verdicts that the circuit breaker holds back and wants them acted on (``rackctl
    close-breaker``)."""


class CostsMeasured(_Event, frozen=True, kw_only=True):
    """Measurements of the coordinator that the core cannot make, sent when they have changed enough to matter."""

    step_s: float | None = None
    copy_bytes_per_s: float | None = None
    state_bytes: float | None = None
    """Bytes of state of one rank."""
    checkpoint: Step | None = None
    """The step of the newest checkpoint on disk."""
    checkpoint_every_s: float | None = None


class PolicyAnswered(_Event, frozen=True, kw_only=True):
    """Answer to AskPolicy. The core checks whether the decision is possible."""

    question: int
    decision: Decision | None = None
    """None: the user's function leaves the decision to the default, or failed (see ``trouble``)."""
    trouble: str = ""
    """Why there is no usable answer: the function raised, returned another type, or took too long."""


class RackDelivered(_Event, frozen=True, kw_only=True):
    """The provider reports that a rack is there: its agents have joined or will join."""

    request: int
    """As `RequestRack.request`."""
    trays: tuple[TrayId, ...]
    """The names of the rack's trays."""


class RackRefused(_Event, frozen=True, kw_only=True):
    """A request failed: the provider refused it or broke down. If the rack has come already, nobody manages it any
    more."""

    request: int
    because: str
    failed: bool = False
    """Whether the provider raised or its process ended. Parts of the rack may exist then and have to be released."""


class RackPreempted(_Event, frozen=True, kw_only=True):
    """The provider announces that it will soon take a rack back."""

    request: int
    because: str
    trays: tuple[TrayId, ...] = ()
    """The trays that it takes back; (): the whole rack."""


class DrainRequested(_Event, frozen=True, kw_only=True):
    """An operator wants a tray or a slot to be out of use (``rackctl drain``)."""

    request: str
    """Name of the request. Every `Answer` to it carries this name."""
    target: str
    because: str = ""
    wait: bool = False
    """Whether to wait for spares if there are too few now."""
    steps: int = 0
    """Steps committed since this coordinator began, as the coordinator was told."""


class ReturnRequested(_Event, frozen=True, kw_only=True):
    """An operator allows a drained tray or slot to be used again (``rackctl return``)."""

    request: str
    target: str


class SwapRequested(_Event, frozen=True, kw_only=True):
    """An operator wants a rank to move to a spare (``rackctl swap``)."""

    request: str
    rank: Rank
    to: str = ""
    """Slot of the spare; "": the best spare."""
    steps: int = 0
    """As `DrainRequested.steps`."""


class ShrinkRequested(_Event, frozen=True, kw_only=True):
    """An operator wants fewer ranks (``rackctl shrink``) until more are requested."""

    request: str
    ranks: tuple[Rank, ...] = ()
    """The ranks to remove; ranks that cannot stay without them are removed too. (): see ``to``."""
    to: int = 0
    """How many ranks to keep, whichever they are."""
    steps: int = 0
    """As `DrainRequested.steps`."""


class GrowRequested(_Event, frozen=True, kw_only=True):
    """An operator allows the world to have more ranks again (``rackctl grow``)."""

    request: str
    to: int = 0
    """Number of ranks; 0: as many as the job began with."""


class PolicyRequested(_Event, frozen=True, kw_only=True):
    """An operator changes how failures are answered from now on (``rackctl policy``)."""

    request: str
    policy: str | None = None
    """As ``--policy``; None: unchanged."""
    weights: str | None = None
    """As ``--policy-weights``; None: unchanged."""
    trouble: str = ""
    """Why the function that ``policy`` names cannot be called; the coordinator has tried to load it. "": it can be."""


class DepartureAnnounced(_Event, frozen=True, kw_only=True):
    """A tray's agent has been told to leave, for example by a scheduler's notice. It leaves when it is dismissed or its
    grace period ends."""

    shows_fault = "yes"
    tray: TrayId
    because: str
    exit_code: int
    """Exit code of the job if no other tray stays."""


class StopRequested(_Event, frozen=True, kw_only=True):
    """An operator or the scheduler wants the job to end at the next step boundary (Ctrl-C, SIGTERM, ``rackctl``)."""

    shows_fault = "perhaps"
    because: str
    exit_code: int


class JournalFailed(_Event, frozen=True, kw_only=True):
    """A generation could not be written to the journal, so it must not be announced."""

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
    | SourcesDiffer
)
TrayEvent: TypeAlias = TrayJoined | TrayDescribed | TrayStoodStill | DeviceJudged | DeviceChecked | DepartureAnnounced
"""All events that an agent sends about its tray, besides those of its workers."""
JobEvent: TypeAlias = (
    TrayEvent
    | TrayLost
    | BreakerClosed
    | DrainRequested
    | ReturnRequested
    | SwapRequested
    | ShrinkRequested
    | GrowRequested
    | PolicyRequested
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
"""All events that are not about one worker: of trays, timers, operators, the provider and the coordinator itself."""
Event: TypeAlias = WorkerEvent | JobEvent
