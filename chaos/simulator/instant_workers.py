"""Simulate very many workers that answer the core at once and in random order, so that only the core is measured.

There is no network, no time between a command and its answer, and no fault except those of a story. Events are given in
rounds: all answers to the commands of one round are the next round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.commands import (
    BreakGeneration,
    Command,
    FenceWorker,
    GenerationPlan,
    PauseWorkers,
    ReleaseWorkers,
    ResumeGeneration,
    SetTimer,
    StartWorker,
    StopJob,
    Worker,
)
from rackrun.protocol.events import (
    Event,
    SnapshotMirrored,
    SnapshotStriped,
    TimerFired,
    TrayJoined,
    WorkerElastic,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
)
from rackrun.protocol.ids import Position, Rank, Step, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import GatherOver

__all__ = ["InstantWorkers"]


class InstantWorkers:
    """The workers of one job. ``config`` is without the trays.

    ``own``: each rank's state is its own; otherwise all ranks are replicas of each other.
    """

    def __init__(
        self,
        trays: int,
        slots: int,
        config: JobConfig,
        *,
        own: bool = False,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.core = ControlPlane(config)
        self.slots, self.own = slots, own
        self.events, self.cpu_s = 0, 0.0
        self.plan: GenerationPlan | None = None
        self.stopped: StopJob | None = None
        self.done = 0
        """The last step whose gate all ranks have passed."""
        self.sealed: tuple[Step, ...] = ()
        """The steps of which every rank has a snapshot."""
        self.at_ms = 0
        self._draw = random.Random(1)
        self._clock = clock
        self.settle([self._joins(TrayId(f"tray-{number:05}")) for number in range(trays)])

    # -- input of the core -----------------------------------------------------------------------------------------
    def submit(self, events: Sequence[Event]) -> list[Command]:
        """Give the events to the core, and return its commands. The clock is read once for all events."""
        handle = self.core.handle
        out: list[Command] = []
        began = self._clock()
        for event in events:
            out += handle(event)
        self.cpu_s += self._clock() - began
        self.events += len(events)
        return out

    def settle(self, events: Sequence[Event]) -> None:
        """Give the events to the core, and then all answers to its commands, until no answer is left."""
        while events:
            events = self._answers(self.submit(events))

    def forget_costs(self) -> None:
        self.events, self.cpu_s = 0, 0.0

    # -- what happens ----------------------------------------------------------------------------------------------
    def train(self, steps: int = 100) -> None:
        """Let the ranks do ``steps`` more steps."""
        self.done += steps
        self.at_ms += 100_000

    @property
    def workers(self) -> list[Worker]:
        """The workers that train, by rank."""
        assert self.plan is not None
        return [Worker(member.slot, member.incarnation) for member in self.plan.members]

    def rank(self, rank: int) -> Worker:
        return self.workers[rank]

    def killed(self, worker: Worker) -> WorkerExited:
        """Return the event of a worker's death by SIGKILL."""
        slot, incarnation, step = worker.slot, worker.incarnation, Step(self.done + 1)
        return WorkerExited(
            at_ms=self.at_ms, slot=slot, incarnation=incarnation, signal=9, step=step, snapshots=self.sealed
        )

    def copied(self, steps: tuple[Step, ...]) -> list[SnapshotMirrored]:
        """Return the events that say: the next tray has the snapshots of ``steps`` of every rank, and so has the rank
        itself."""
        assert self.plan is not None
        self.sealed = steps
        found = []
        for slot, incarnation in ((worker.slot, worker.incarnation) for worker in self.workers):
            address, _, holder = self.plan.mirrors[tray_of(slot)].rpartition("/")
            found.append(
                SnapshotMirrored(
                    at_ms=self.at_ms,
                    slot=slot,
                    incarnation=incarnation,
                    generation=self.plan.generation,
                    holder=TrayId(holder),
                    where=f"{address}/{slot}/{incarnation}",
                    steps=steps,
                )
            )
        return found

    def striped(self, step: Step) -> list[SnapshotStriped]:
        """Return the events that say: all keepers have the stripes of every rank's snapshot of ``step``."""
        assert self.plan is not None
        self.sealed = (step,)
        return [
            SnapshotStriped(
                at_ms=self.at_ms,
                slot=one.slot,
                incarnation=one.incarnation,
                generation=self.plan.generation,
                step=step,
            )
            for one in self.workers
        ]

    def finished(self) -> list[WorkerFinished]:
        """Return the events that say that all ranks have finished."""
        return [
            WorkerFinished(at_ms=self.at_ms, slot=one.slot, incarnation=one.incarnation)
            for one in self._in_no_order(self.workers)
        ]

    # -- answers of the workers ------------------------------------------------------------------------------------
    def _joins(self, tray: TrayId) -> TrayJoined:
        return TrayJoined(tray=tray, host=tray, slots=self.slots, store=f"{tray}:1", snapshots=f"{tray}:2", codec=True)

    def _in_no_order(self, workers: Iterable[Worker]) -> list[Worker]:
        found = list(workers)
        self._draw.shuffle(found)
        return found

    def _answers(self, commands: Sequence[Command]) -> list[Event]:
        first: list[Event] = []
        then: list[Event] = []
        launch = any(isinstance(command, StartWorker) and not command.spare for command in commands)
        for command in commands:
            match command:
                case SetTimer(timer=GatherOver()):
                    first.append(TimerFired(at_ms=self.at_ms, timer=command.timer))
                case StartWorker():
                    then += self._starts(command)
                case FenceWorker():
                    then.append(self.killed(Worker(command.slot, command.incarnation)))
                case BreakGeneration():
                    then += [self._parks(one, command) for one in self._in_no_order(command.workers)]
                case PauseWorkers():
                    then += [
                        WorkerPaused(
                            at_ms=self.at_ms,
                            slot=one.slot,
                            incarnation=one.incarnation,
                            generation=command.generation,
                        )
                        for one in self._in_no_order(command.workers)
                    ]
                case ResumeGeneration():
                    self.plan = command.plan
                    then += [] if launch else self._resume(command.plan)
                case ReleaseWorkers():
                    then += [self._leaves(one) for one in self._in_no_order(command.workers)]
                case StopJob():
                    self.stopped = command
                case _:
                    pass
        return first + then

    def _starts(self, command: StartWorker) -> list[Event]:
        slot, incarnation, at_ms = command.slot, command.incarnation, self.at_ms
        kind = "" if command.spare else self._class_of(command.rank)
        return [
            WorkerElastic(at_ms=at_ms, slot=slot, incarnation=incarnation),
            WorkerReady(at_ms=at_ms, slot=slot, incarnation=incarnation, replica_class=kind, fixed="", exact=True),
        ]

    def _class_of(self, rank: Rank) -> str:
        return f"shard {rank}" if self.own else "all"

    def _parks(self, worker: Worker, command: BreakGeneration) -> WorkerParked:
        return WorkerParked(
            at_ms=self.at_ms,
            slot=worker.slot,
            incarnation=worker.incarnation,
            generation=command.generation,
            passed=Position(self.done),
            entered=Position(self.done),
            gate=(1.0,),
            snapshots=self.sealed,
        )

    def _resume(self, plan: GenerationPlan) -> list[Event]:
        if plan.rollback is not None:
            self.done = plan.rollback
        found = self._in_no_order(Worker(member.slot, member.incarnation) for member in plan.members)
        return [
            WorkerResumed(at_ms=self.at_ms, slot=one.slot, incarnation=one.incarnation, generation=plan.generation)
            for one in found
        ]

    def _leaves(self, worker: Worker) -> WorkerExited:
        return WorkerExited(
            at_ms=self.at_ms,
            slot=worker.slot,
            incarnation=worker.incarnation,
            exit_code=0,
            step=Step(self.done),
            snapshots=self.sealed,
        )
