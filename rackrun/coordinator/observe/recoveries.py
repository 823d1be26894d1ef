"""Record of each recovery with its times, for the report, the status line and the operator.

A pure observer: it receives every event and every command that the driver handles, with the time, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from rackrun.protocol.commands import (
    BreakGeneration,
    Command,
    CondemnWorker,
    Decided,
    FenceWorker,
    GenerationPlan,
    Restore,
    ResumeGeneration,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import (
    Event,
    ReplicasDiffer,
    TrayJoined,
    TrayLost,
    WorkerElastic,
    WorkerExited,
    WorkerParked,
    WorkerPaused,
    WorkerResumed,
    WorkerStalled,
    WorkerUnbuilt,
)
from rackrun.protocol.ids import BEGIN, Incarnation, Position, Rank, SlotId, TrayId, tray_of
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.wire import StateCopied, UnitCommitted

__all__ = ["LostRank", "RecoveryRecord", "RecoveryWatch", "named_steps"]

_STALLED = "stalled for"
_GONE = "gone"


class LostRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was lost in a recovery, or whose worker was replaced on purpose."""

    rank: Rank
    slot: SlotId
    how: str
    """How it was lost, ``SIGKILL``, ``exit code 1``, ``stalled for 1200 ms``, ``tray lost: ...``; or why it was
    replaced."""
    to: SlotId | None = None
    """Slot of the worker that took over; None if the world shrank."""
    on_purpose: bool = False
    """Whether its worker had not failed: it was taken out because its state was wrong, its GPU fails, it was slow, or
    somebody asked for it."""


class RecoveryRecord(msgspec.Struct, kw_only=True):
    """One answer to a failure. Times are milliseconds of the coordinator's clock; None: the stage was never reached."""

    generation: int
    kind: str
    """``swap``, ``restart`` (the whole world, in place), ``resize`` (the world shrank or grew), ``regroup`` (no rank
    was lost)."""
    because: str
    fault_ms: float
    """When the first event of the failure arrived. A newer generation that replaces this one keeps it."""
    break_ms: float | None = None
    parked_ms: float | None = None
    plan_ms: float | None = None
    resumed_ms: float | None = None
    committed_ms: float | None = None
    """When every rank of the new world had committed a unit."""
    lost: tuple[LostRank, ...] = ()
    freed: tuple[SlotId, ...] = ()
    """Slots whose workers were ended because their replica had lost another rank; spares start there."""
    joined: tuple[SlotId, ...] = ()
    """Slots whose workers joined a world that has grown."""
    world_size: int = 0
    restores: tuple[str, ...] = ()
    """Where each restored rank's state came from: ``rank 2 from rank 0``."""
    sources: tuple[str, ...] = ()
    """Kind of source of each restored rank: ``live_peer``, ``own_snapshot`` (its process lives), ``its_tray`` (left
    there by the process before), ``other_tray``, ``parity``."""
    rollback: int | None = None
    """The step whose state all ranks went back to; None: no rollback."""
    redone: tuple[int, ...] = ()
    """Steps computed again: the one that was broken, and those since the rollback or since a restart's checkpoint."""
    planned: bool = False
    """Whether nothing was lost, because all ranks stood between two steps when the rank on a failing GPU was taken
    out."""
    stages: dict[int, dict[str, float]] = {}
    """For each rank, when it reached each stage, as in `rackrun.protocol.wire.UnitCommitted`."""
    overtaken: bool = False
    """Whether a newer generation replaced this one before its world had resumed."""
    rungs: tuple[str, ...] = ()
    """The rungs that were decided (`rackrun.policy.Rung`), in order: a ``swap`` may follow a ``wait``."""
    reasons: tuple[str, ...] = ()
    """The reason for each rung, with its figures."""
    whose: str = ""
    """What the failure was attributed to (`rackrun.policy.FailureCause`)."""
    decided_ms: float | None = None
    """Time of the first decision."""
    held_ms: float = 0.0
    """Time that all ranks waited in a hold, until the next decision or the end of the job."""
    predicted_gpu_s: float | None = None
    """Unweighted GPU-seconds that the first decision predicted until all compute again, including repeated work; a hold
    predicts nothing. None: unknown, as for a plain script, which does not report what it computes again."""
    measured_gpu_s: float | None = None
    """The same, measured, without the time of a hold: the first repeated step as it was, and an undisturbed step for each other. None: the recovery
    was overtaken or never completed."""

    def measure(self, step_s: float | None) -> None:
        """Compute `measured_gpu_s`. ``step_s`` is the time of an undisturbed step in seconds."""
        if self.decided_ms is None or self.resumed_ms is None or self.overtaken:
            return
        until_ms, more = self.resumed_ms, len(self.redone)
        if more and self.committed_ms is not None:  # the time of the first is known
            step_s = step_s or (self.committed_ms - self.resumed_ms) / 1e3 or None
            until_ms, more = self.committed_ms, more - 1
        if more and step_s is None:
            return
        spent_ms = until_ms - self.decided_ms - self.held_ms
        self.measured_gpu_s = self.world_size * (spent_ms / 1e3 + more * (step_s or 0.0))

    @property
    def ended_with_job(self) -> bool:
        """Whether the job ended before a plan followed, or another failure."""
        return self.plan_ms is None and not self.overtaken

    @property
    def seconds(self) -> float | None:
        """Seconds from the fault until every rank computed again."""
        return None if self.resumed_ms is None else (self.resumed_ms - self.fault_ms) / 1e3

    def line(self) -> str:
        """Return a line for people: ``rank 2 lost on tray-00/2 (SIGKILL) -> tray-00/4 in 0.38 s, step 41 done
        again``."""
        restart = self.kind == "restart"
        who = "; ".join(
            f"rank {one.rank} {_left(one, planned=self.planned)} {one.slot} ({one.how})"
            + ("" if restart or self.kind == "resize" else _successor(one))
            for one in self.lost
        )
        if self.freed:
            as_what = "a spare" if len(self.freed) == 1 else "spares"
            who = "; ".join(filter(None, [who, f"{', '.join(self.freed)} will wait as {as_what}"]))
        if self.joined:
            verb = "joins" if len(self.joined) == 1 else "join"
            who = "; ".join(filter(None, [who, f"{', '.join(self.joined)} {verb} at a step boundary"]))
        parts = [who or self.because]
        if self.ended_with_job:
            parts.append(" -> the job ended")
            parts.append(f", after {self.held_ms / 1e3:.2f} s in a hold" if self.held_ms else "")
        elif restart:
            parts.append(f" -> all {self.world_size} workers start again")
        elif not who and not self.overtaken:
            parts.append(" -> all go on")
        elif self.kind == "resize":
            parts.append(" -> 1 rank goes on" if self.world_size == 1 else f" -> {self.world_size} ranks go on")
        if self.overtaken:
            parts.append(", overtaken by another failure")
        elif self.seconds is not None:
            held = f", {self.held_ms / 1e3:.2f} s of it in a hold" if self.held_ms else ""
            parts.append(f" in {self.seconds:.2f} s{held}")
        if self.rollback is not None and self.planned and not self.redone:
            parts.append(f", goes on from the state after step {self.rollback}")
        elif self.rollback is not None:
            parts.append(f", back to the state after step {self.rollback}")
        if self.redone:
            parts.append(f", {named_steps(self.redone)} done again")
        return "".join(parts)


def named_steps(steps: Sequence[int]) -> str:
    """Return steps in words, at least one, in order: ``step 4``, ``steps 4 to 7``, ``steps 4, 6``."""
    first, last = steps[0], steps[-1]
    if first == last:
        return f"step {first}"
    whole = len(steps) == last - first + 1
    return f"steps {first} to {last}" if whole else f"steps {', '.join(map(str, steps))}"


def _left(one: LostRank, *, planned: bool) -> str:
    if planned:
        return "leaves"
    return "taken out on" if one.on_purpose else "lost on"


def _successor(one: LostRank) -> str:
    if one.to == one.slot:
        return ", started again there"
    return f" -> {one.to or 'nobody, the world shrinks'}"


class RecoveryWatch:
    """Follows the generations. ``on_done`` receives each recovery once: when it is complete or overtaken, or the job
    has ended."""

    def __init__(self, on_done: Callable[[RecoveryRecord], None]) -> None:
        self._on_done = on_done
        self._open: RecoveryRecord | None = None
        self._plan: GenerationPlan | None = None
        self._how: dict[SlotId, str] = {}
        self._fault_ms: float | None = None
        self._due = set[int]()  # steps to do again that an overtaken recovery has left
        self._held_since: float | None = None  # when the hold under way was decided
        self._waiting: set[tuple[SlotId, Incarnation]] = set()  # members that have not resumed
        self._uncommitted: set[Rank] = set()  # ranks without a commit since the recovery
        self._from = BEGIN
        self._restarts = 0
        self._counted = 0  # restarts of a plain script that were told of
        self._newest_step = -1
        self._last_step = -1  # the newest step that a member was in when it exited
        self._in_hand = -1  # the newest step that a worker of the broken generation had begun
        self._elastic = False
        self._wrong: set[SlotId] = set()  # ended by rackrun, because their state differs from that of their replicas
        self._differ = False  # whether commands now answer a report that replicas differ
        self._fenced: set[SlotId] = set()  # ended by rackrun, without a fault of their own
        self._paused: set[SlotId] = set()
        self._trays: dict[str, TrayId] = {}  # by the address of their snapshots
        self._resumed: list[RecoveryRecord] = []
        """Recoveries before the open one after which all ranks paused once more before each had committed a unit."""
        self.last: RecoveryRecord | None = None

    @property
    def plan(self) -> GenerationPlan | None:
        """The latest plan."""
        return self._plan

    def on_event(self, event: Event, now_ms: float) -> None:
        """Handle an event that arrived at ``now_ms``. The commands that answer it follow before the next."""
        self._differ = isinstance(event, ReplicasDiffer)
        match event:
            case WorkerElastic():
                self._elastic = True
            case TrayJoined():
                self._trays[event.snapshots] = event.tray
            case WorkerExited():
                self._exited(event, now_ms)
            case WorkerStalled():
                self._stalled(event, now_ms)
            case TrayLost():
                for member in self._plan.members if self._plan else ():
                    if tray_of(member.slot) == event.tray:
                        self._fault(member.slot, f"tray lost: {event.because}", now_ms)
            case WorkerUnbuilt() if (
                self._open is None or self._open.kind == "restart"
            ):  # otherwise it is built again in place
                self._fault(event.slot, "could not build its groups", now_ms)
            case WorkerPaused() if self._plan and event.generation == self._plan.generation:
                self._paused.add(event.slot)
            case WorkerParked() if self._open and event.generation == self._open.generation:
                self._open.parked_ms = now_ms
                self._in_hand = max(self._in_hand, -1 if event.begun.phase else event.begun.step)
            case WorkerResumed() if self._plan and event.generation == self._plan.generation:
                self._waiting.discard((event.slot, event.incarnation))
                if (
                    self._open
                    and not self._waiting
                    and self._open.plan_ms is not None
                    and self._open.resumed_ms is None
                ):
                    self._open.resumed_ms = now_ms
            case _:
                pass

    def on_command(self, command: Command, cause_ms: float, now_ms: float) -> None:
        """Handle a command. ``cause_ms`` is when the event arrived that the command answers."""
        match command:
            case BreakGeneration():
                if self._open is None or self._open.generation != command.generation:
                    self._begin(command.generation, "regroup", command.because, cause_ms)
                assert self._open is not None
                if self._open.break_ms is None:
                    self._open.break_ms = now_ms
            case CondemnWorker() if command.slot not in self._how:
                self._fault(command.slot, command.because, cause_ms)
            case FenceWorker() if command.slot not in self._how:
                if command.swept_along:
                    self._fenced.add(command.slot)
                else:
                    self._fault(command.slot, command.because, cause_ms)
                    if self._differ:
                        self._wrong.add(command.slot)
            case StartWorker() if command.restarts > self._restarts:  # before or after its generation's plan
                self._restarts = command.restarts
                if self._open is None:
                    self._begin(command.generation, "restart", "all start again", cause_ms)
                assert self._open is not None
                self._open.kind = "restart"
                self._settle_restart()
            case Decided():
                self._decided(command, cause_ms, now_ms)
            case ResumeGeneration():
                self._planned(command, now_ms)
            case StopJob():
                self._end_hold(now_ms)
            case _:
                pass

    def committed(self, unit: UnitCommitted, now_ms: float) -> None:
        """Note a rank's committed unit: a recovery is over when every rank has committed one."""
        recovery = self._open
        self._newest_step = max(self._newest_step, unit.at.step)
        if recovery is None or self._plan is None or unit.generation < self._plan.generation or unit.at <= self._from:
            return
        self._due.clear()
        broken = (*self._resumed, recovery)[0]  # a pause between two steps breaks none
        if unit.attempt > unit.rescaled and unit.at.phase == 0 and unit.at.step not in broken.redone:
            broken.redone = tuple(sorted({*broken.redone, unit.at.step}))
        self._uncommitted.discard(unit.rank)
        if unit.stages:
            recovery.stages = {**recovery.stages, unit.rank: unit.stages}
        if not self._uncommitted and recovery.plan_ms is not None:
            recovery.committed_ms = now_ms
            # A rank's resumption may be heard in the same moment as its unit, or later: then the unit says when it began.
            if recovery.resumed_ms is None or recovery.resumed_ms >= now_ms:
                recovery.resumed_ms = max(recovery.plan_ms, now_ms - unit.seconds * 1e3)
            self._end()

    def copied(self, told: StateCopied) -> None:
        """Count fewer repeated steps if a restarted world resumes from a checkpoint."""
        recovery = self._open
        if told.kind == "resume" and recovery is not None and recovery.kind == "restart":
            recovery.redone = tuple(step for step in recovery.redone if step > told.at.step)

    def finish(self) -> None:
        """Close the open recovery, because the job has ended."""
        self._end()

    def _exited(self, event: WorkerExited, now_ms: float) -> None:
        if self._plan and any(member.slot == event.slot for member in self._plan.members):
            self._last_step = max(self._last_step, event.step)
        if event.slot not in self._fenced:
            self._fault(event.slot, event.how, now_ms)

    def _stalled(self, event: WorkerStalled, now_ms: float) -> None:
        how = f"{_STALLED} {event.for_ms} ms"
        if event.over and self._how.get(event.slot, "").startswith(_STALLED):
            del self._how[event.slot]
            self._fault_ms = self._fault_ms if self._how else None
        elif event.early and not event.waiting:
            self._how[event.slot] = how  # again and again; it is a fault only if the others' times say so
        elif not (event.over or event.waiting):
            self._fault(event.slot, how, now_ms)

    def _fault(self, slot: SlotId, how: str, now_ms: float) -> None:
        self._how.setdefault(slot, how)
        members = self._plan.members if self._plan else ()
        if self._fault_ms is None and any(member.slot == slot for member in members):
            self._fault_ms = now_ms

    def _begin(self, generation: int, kind: str, because: str, cause_ms: float) -> None:
        fault_ms = cause_ms
        planned = self._plan is not None and self._paused == {member.slot for member in self._plan.members}
        if self._open is not None:
            if self._open.resumed_ms is None:
                fault_ms = self._open.fault_ms
                self._open.overtaken = True
                self._due |= {*self._open.redone}  # nothing was done again: the new one has that to do
                self._open.redone = ()
            if planned and not self._open.overtaken:
                self._resumed.append(self._open)
            else:
                self._end()
        elif self._fault_ms is not None and self._fault_ms < fault_ms:
            fault_ms = self._fault_ms  # such as the first exit of several, before all start again
        self._open = RecoveryRecord(
            generation=generation, kind=kind, because=because, fault_ms=fault_ms, planned=planned
        )

    def _decided(self, command: Decided, cause_ms: float, now_ms: float) -> None:
        decision = command.decision
        if self._open is None or self._open.plan_ms is not None:  # there was no member to break
            kind = "restart" if decision.rung is Rung.RESTART else "regroup"
            self._begin(command.generation, kind, command.failure.what, cause_ms)
        recovery = self._open
        assert recovery is not None
        recovery.rungs += (decision.rung.value,)
        recovery.reasons += (decision.reason,)
        recovery.whose = command.failure.whose.value
        if command.failure.ranks:
            recovery.because = command.failure.what  # more may be lost than when the generation was broken
        self._end_hold(now_ms)
        self._held_since = now_ms if decision.rung is Rung.HOLD else None
        if recovery.decided_ms is None:
            recovery.decided_ms = now_ms
        if decision.rung is not Rung.HOLD and all(rung == Rung.HOLD.value for rung in recovery.rungs[:-1]):
            seconds = [value for name, value in decision.figures.items() if not name.endswith("_gpu_s")]
            recovery.predicted_gpu_s = sum(seconds) * (self._plan.world_size if self._plan else 0) if seconds else None

    def _end_hold(self, now_ms: float) -> None:
        if self._open is not None and self._held_since is not None:
            self._open.held_ms += now_ms - self._held_since
        self._held_since = None

    def _planned(self, command: ResumeGeneration, now_ms: float) -> None:
        plan, before = command.plan, self._plan
        self._plan = plan
        self._waiting = {(m.slot, m.incarnation) for m in plan.members}
        self._uncommitted = {m.rank for m in plan.members}
        self._from = plan.committed if plan.rollback is None else Position(plan.rollback)
        if before is not None and (self._open is None or self._open.plan_ms is not None):
            self._begin(plan.generation, "restart", command.because, now_ms)  # no member was left to break
        recovery = self._open
        if recovery is not None:
            recovery.generation = plan.generation
            recovery.plan_ms = now_ms
            recovery.because = command.because or recovery.because
            recovery.world_size = plan.world_size
            recovery.rollback = plan.rollback
            recovery.restores = tuple(_told(r) for r in plan.restores)
            recovery.sources = _sources(plan, self._trays)
            if plan.rollback is not None:
                recovery.redone = tuple(range(plan.rollback + 1, max(plan.committed.step, self._in_hand) + 1))
                self._newest_step, self._last_step = plan.rollback, -1  # later steps have not been done any more
            if before is not None:
                recovery.lost = self._lost(before, plan, planned=recovery.planned)
                if recovery.kind != "restart":
                    resized = before.world_size != plan.world_size
                    if plan.world_size < before.world_size:
                        recovery.freed = tuple(one.slot for one in recovery.lost if one.slot in self._fenced)
                        recovery.lost = tuple(one for one in recovery.lost if one.slot not in self._fenced)
                    recovery.kind = "resize" if resized else "swap" if recovery.lost else "regroup"
                    was = {(m.slot, m.incarnation) for m in before.members}
                    recovery.joined = tuple(
                        m.slot for m in plan.members if resized and (m.slot, m.incarnation) not in was
                    )
            self._settle_restart()
            recovery.redone = tuple(sorted({*recovery.redone, *(step for step in self._due if step > self._from.step)}))
        self._how.clear()
        self._fenced.clear()
        self._wrong.clear()
        self._paused.clear()
        self._in_hand = -1
        self._fault_ms = None

    def _settle_restart(self) -> None:
        """Complete a restart once both its plan and its count are known. A plain script does not report when it
        computes again, so nothing more will come."""
        recovery = self._open
        if recovery is None or recovery.kind != "restart" or recovery.plan_ms is None:
            return
        recovery.lost = tuple(one for one in recovery.lost if one.how != _GONE) or recovery.lost
        if self._plan is not None and self._plan.rollback is None:
            newest = max(self._newest_step, self._last_step)
            recovery.redone = tuple(range(self._plan.committed.step + 1, newest + 1))
        if not self._elastic and self._restarts > self._counted:
            self._counted = self._restarts
            self._end()

    def _lost(self, before: GenerationPlan, after: GenerationPlan, *, planned: bool) -> tuple[LostRank, ...]:
        now = {m.rank: m for m in after.members} if before.world_size == after.world_size else {}
        alive = {(m.slot, m.incarnation) for m in after.members}
        return tuple(
            LostRank(
                rank=m.rank,
                slot=m.slot,
                how=self._how.get(m.slot, _GONE),
                to=now[m.rank].slot if m.rank in now else None,
                on_purpose=planned or m.slot in self._wrong,
            )
            for m in before.members
            if (m.slot, m.incarnation) not in alive
        )

    def _end(self) -> None:
        ended, self._resumed = self._resumed, []
        if self._open is not None:
            ended.append(self._open)
            self._open = None
        for recovery in ended:
            self.last = recovery
            self._on_done(recovery)


def _sources(plan: GenerationPlan, trays: Mapping[str, TrayId]) -> tuple[str, ...]:
    found = []
    for restore in plan.restores:
        if restore.sources:
            found.append("live_peer")
        elif restore.snapshot:
            address, _, worker = restore.snapshot.partition("/")
            own = trays.get(address) == tray_of(SlotId(worker.rpartition("/")[0]))
            found.append("its_tray" if own else "other_tray")
        else:
            found.append("parity")
    if plan.rollback is not None:
        found += ["own_snapshot" for member in plan.members if not member.fresh]
    return tuple(found)


def _told(restore: Restore) -> str:
    if restore.snapshot:
        return f"rank {restore.rank} from snapshot {restore.snapshot}"
    ranks = ", ".join(str(rank) for rank in restore.sources or [one.rank for one in restore.rebuild])
    return f"rank {restore.rank} {'from rank' if restore.sources else 'rebuilt from rank'} {ranks}"
