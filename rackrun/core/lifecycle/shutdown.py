"""End of a job without a failure: all ranks return, or the job is asked to stop at the next step boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rackrun.core.faults.peer_times import PeerTimes, hangs
from rackrun.core.faults.script_bug import is_scripts
from rackrun.core.generation.job_end import JobEnd
from rackrun.core.generation.outbox import Outbox
from rackrun.core.generation.world import Phase, World
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import Loss, Trigger, WorkerRecord
from rackrun.protocol.commands import DrainWorkers, Notice, ReleaseWorkers, SetTimer
from rackrun.protocol.events import StopRequested, WorkerStalled
from rackrun.protocol.ids import Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.timers import DrainOver, ExitsOver

__all__ = ["DRAIN_MS", "EXITS_MS", "Shutdown", "ended_well"]

DRAIN_MS = 60_000
"""Milliseconds from a request to stop until the job is ended without further waiting."""

EXITS_MS = 2_400_000
"""Milliseconds from the release until the job is ended without further waiting. Agents detect hanging workers long
before (`rackrun.agent.tray.worker_liveness`)."""


@dataclass(slots=True)
class Shutdown:
    """Ends the job."""

    config: JobConfig
    world: World
    rack: RackMachine
    out: Outbox
    end: JobEnd
    gone: dict[Rank, None] = field(default_factory=dict)
    """Ranks that have exited well: those of a plain script, or after the release."""
    _released_ms: int = 0
    _ended_in_ms: int = 0
    """Time from the release until the slowest of the ended ranks exited, in milliseconds."""
    _idle: PeerTimes = field(default_factory=PeerTimes)
    """Reports of released ranks that show no sign of life."""

    def release_if_finished(self, at_ms: int) -> None:
        """Release all workers if every rank has finished."""
        world = self.world
        if world.phase is not Phase.TRAINING or world.awaited:
            return
        world.enter(Phase.ENDING, f"all {world.size} ranks have finished")
        self._released_ms = at_ms
        going = [*world.members.values(), *self.rack.spares()]
        for record in going:
            record.move(Trigger.RELEASE)
        self.out.emit(ReleaseWorkers(workers=tuple(record.worker for record in going)))
        self.out.emit(
            SetTimer(timer=ExitsOver(world.generation), at_ms=at_ms + max(self.config.join_timeout_ms, EXITS_MS))
        )

    def plain_ended(self, losses: Sequence[Loss]) -> None:
        """Handle ranks of a plain script that exited with code 0."""
        self._go(losses)
        if len(self.gone) == self.world.size:
            self.end.stop(0, f"all {self.world.size} ranks exited with code 0")

    def ended(self, losses: Sequence[Loss]) -> None:
        """Handle released ranks that have exited."""
        for loss in losses:
            self._go([loss])
            if loss.exit is not None:
                self._ended_in_ms = max(self._ended_in_ms, loss.exit.at_ms - self._released_ms)
            if not ended_well(loss):
                if loss.exit is None or not is_scripts(loss.exit):
                    self._tell_gone([loss])  # its work was done
                    continue
                self.end.stop(
                    1,
                    f"rank {loss.record.rank} had finished training but did not exit well: {loss.because}",
                    remedy="look at what the script does after training.",
                    failure=loss.failure,
                    rank=loss.record.rank,
                )
                return
        self._look_for_the_end()

    def stands_still(
        self,
        record: WorkerRecord,
        event: WorkerStalled,
        because: str,
    ) -> None:
        """Fence a released worker that does not exit, if its limit or the times of the others show that it hangs."""
        if event.early and (record.rank is None or not self._hangs(record.rank, event)):
            return
        self.out.emit(self.rack.fence(record, because, fault=True))
        if record.rank is not None:
            loss = Loss(record=record, because=because)
            self._go([loss])
            self._tell_gone([loss])
            self._look_for_the_end()

    def _hangs(self, rank: Rank, event: WorkerStalled) -> bool:
        """Return whether an idle rank hangs: at least half of the ranks have exited, all others are idle, and this rank
        has been idle for three times as long as the slowest took to exit."""
        self._idle.add(rank, event)
        idle, there = self._idle.idle(event.at_ms), self.world.members
        if any(one not in idle for one in there) or 2 * len(there) > len(there) + len(self.gone):
            return False
        return hangs(event.for_ms, [self._ended_in_ms])

    def retired(self, losses: Sequence[Loss], at_ms: int) -> None:
        """Handle ranks that had finished and have exited while others still train."""
        self._tell_gone(losses)
        self.release_if_finished(at_ms)
        if self.world.phase is Phase.ENDING:
            self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        if len(self.gone) + len(self.world.retired) < len(self.world.seats):
            return  # avoids a search over all ranks for each exit
        if self.world.phase is Phase.ENDING and not self.not_gone():
            because = self.world.stopping.because if self.world.stopping else self.world.reason
            self.end.stop(self.world.stopping.exit_code if self.world.stopping else 0, because)

    def _tell_gone(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            self.out.emit(Notice(text=f"rank {loss.record.rank} had finished training, and is gone: {loss.because}"))

    def not_gone(self) -> list[SlotId]:
        """Return the slots of the ranks that have not exited."""
        there = {**self.gone, **self.world.retired}
        return [slot for rank, slot in sorted(self.world.seats.items()) if rank not in there]

    # -- somebody wants it to stop ---------------------------------------------------------------------------------
    def departed(self, event: StopRequested, *, may_drain: bool) -> None:
        """Stop the job because all trays are told to leave.

        If all ranks wait, they have their state as long as the trays are there: the job ends when the time to drain is
        over, and not before, because spares that come until then can take over.
        """
        world = self.world
        if world.stopping is None:
            self.requested(event, may_drain=may_drain or world.phase is Phase.PARKING)
            world.stops_for_departure = True
            if world.phase is Phase.PARKING:
                until = f"all ranks wait, and the job ends in {DRAIN_MS // 1000} s"
                self.out.emit(
                    Notice(text=f"{event.because}: {until}, or at a step boundary if spares take over before")
                )

    def requested(self, event: StopRequested, *, may_drain: bool) -> None:
        """Stop the job: at the next step boundary if ``may_drain``, and at once on a second request, or if all ranks
        wait and no boundary is to come."""
        world = self.world
        if world.stops_for_departure and may_drain and world.stopping is not None and world.phase is not Phase.ENDING:
            world.stopping, world.stops_for_departure = event, False
            return
        if self.world.stopping is not None or not (may_drain or world.phase is Phase.ENDING):
            self.end.stop(event.exit_code, event.because)
            return
        if world.phase is Phase.ENDING:  # the job ends anyway
            self.world.stopping = StopRequested(at_ms=event.at_ms, because=world.reason, exit_code=0)
            return
        self.world.stopping = event
        self.out.emit(SetTimer(timer=DrainOver(), at_ms=event.at_ms + DRAIN_MS))
        if world.phase is Phase.TRAINING:
            self.drain()

    def drain(self) -> None:
        """If a stop was requested, tell all workers to leave the step loop. Called when all train."""
        if self.world.stopping is not None:
            self.out.emit(DrainWorkers(workers=self.world.workers(), because=self.world.stopping.because))

    def overdue(self) -> None:
        """Stop without waiting for the step boundary any longer."""
        if self.world.stopping is not None:
            self.end.stop(
                self.world.stopping.exit_code, f"{self.world.stopping.because}; not drained within {DRAIN_MS} ms"
            )

    def _go(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            rank = loss.record.rank
            assert rank is not None
            self.world.lose(rank)
            self.gone[rank] = None


def ended_well(loss: Loss) -> bool:
    """Return whether a worker exited with code 0, without a signal or an exception."""
    event = loss.exit
    return event is not None and event.exit_code == 0 and not event.signal and event.failure is None
