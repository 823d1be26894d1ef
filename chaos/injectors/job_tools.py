"""The tools with which one strike hits its subjects in a real job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from rackrun.chaos.faults.fault_types import BaseFault, Subjects
from rackrun.chaos.faults.network.bad_link import Link
from rackrun.chaos.faults.strike_tools import CutShape, GpuReport, Injected
from rackrun.chaos.faults.targets import Scene, Subject
from rackrun.chaos.injectors.common.injection import All, Missed, whom
from rackrun.chaos.injectors.common.inprocess_orders import Ordered
from rackrun.chaos.injectors.network.link_faults import BadLink
from rackrun.chaos.injectors.network.packet_filters import Lossy, Partitioned
from rackrun.chaos.injectors.processes.cpu_slowdown import ByQuota, ByTurns, quota_here
from rackrun.chaos.injectors.processes.return_and_duplicate import Doubled, Returned
from rackrun.chaos.injectors.processes.signals import Killed, Paused, Preempted
from rackrun.chaos.injectors.resources.bit_flips import Flipped, checkpoint_bit, snapshot_bit
from rackrun.chaos.injectors.resources.clock_jumps import Stepped
from rackrun.chaos.injectors.resources.descriptor_limits import WithoutDescriptors
from rackrun.chaos.injectors.resources.gpu_errors import Reported
from rackrun.chaos.injectors.resources.memory_exhaustion import Confined, memory_here
from rackrun.chaos.injectors.resources.storage_faults import Failing, Filled, checkpoints_of
from rackrun.chaos.plan.conductor import StrikeOrder
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["JobTools"]


class JobTools:
    """The tools of one strike, as `rackrun.chaos.faults.strike_tools.StrikeTools`."""

    def __init__(self, strike: StrikeOrder, scene: Scene, job: JobUnderTest, seed: Callable[[], int]) -> None:
        """``seed`` returns the seed for what the fault draws at random."""
        self._strike, self._scene, self._job, self._seed = strike, scene, job, seed
        self._number, self._subjects = strike.number, strike.subjects

    def _processes(self, *subjects: Subject) -> list[Process]:
        return whom(self._job, self._scene, subjects or self._subjects)

    # -- processes
    def send_signal(self, name: str) -> Injected:
        return Killed(self._processes(), signal.Signals[f"SIG{name}"])

    def stop(self) -> Injected:
        return Paused(self._processes(), self._job.undo)

    def ask_to_leave(self, notice_s: float) -> Injected:
        self._processes()  # all are there, before the first is asked
        return All([Preempted(self._processes(one), notice_s) for one in self._subjects])

    def throttle(self, share: float) -> Injected:
        processes, undo = self._processes(), self._job.undo
        above = quota_here(processes[0].pid)
        return ByTurns(processes, share, undo) if above is None else ByQuota(processes, share, undo, above)

    def limit_descriptors(self) -> Injected:
        return WithoutDescriptors(self._processes(), self._job.undo)

    def start_agents(self) -> Injected:
        return All([Returned(self._job, one.name) for one in self._subjects])

    def start_duplicates(self) -> Injected:
        return All([Doubled(self._job, one) for one in self._subjects])

    # -- from inside
    def order(self, fault: BaseFault) -> Injected:
        return self._order(self._processes(), fault, self._seed())

    def order_under_memory_limit(self, fault: BaseFault) -> Injected:
        return All([self._without_memory(process, fault) for process in self._processes()])

    def order_for_storage(self, fault: BaseFault) -> Injected:
        return Failing(fault, self._number, self._job.inside, self._job.undo)

    def _order(self, processes: list[Process], fault: BaseFault, seed: int) -> Ordered:
        return Ordered(processes, self._number, fault, seed, self._job.inside, self._job.undo)

    def _without_memory(self, process: Process, fault: BaseFault) -> Confined:
        above = memory_here(process.pid)
        if above is None:
            raise Missed(f"memory of process {process.pid} cannot be limited")
        return Confined(process, partial(self._order, [process], fault, 0), self._job.undo, above)

    # -- hardware and network
    def report_gpu(self, report: GpuReport) -> Injected:
        assert self._job.driver is not None, "a plan with such a fault brings one"
        slots = [place.slot for one in self._subjects for place in self._scene.of(one)]
        if not slots:
            raise Missed(f"{', '.join(map(str, self._subjects))} is nowhere")
        return Reported(self._job.driver, slots, report, self._job.undo)

    def cut_network(self, cut: CutShape) -> Injected:
        assert self._job.hosts is not None, "made before the job is, for a plan with such a fault"
        groups = [self._trays(subject) for subject in self._subjects]
        return Partitioned(groups, cut, self._number, self._job.hosts, self._job.undo)

    def lose_packets(self, share: float) -> Injected:
        assert self._job.hosts is not None, "made before the job is, for a plan with such a fault"
        return Lossy(self._all_trays(), share, self._number, self._job.hosts, self._job.undo)

    def spoil_links(self, fault: BaseFault) -> Injected:
        assert self._job.links is not None, "made with the hosts"
        assert isinstance(fault, Link)
        return BadLink(self._all_trays(), fault, self._number, self._seed(), self._job.links)

    def both(self, *parts: Injected) -> Injected:
        return All(parts)

    def _all_trays(self) -> list[str]:
        return [tray for subject in self._subjects for tray in self._trays(subject)]

    def _trays(self, subject: Subject) -> list[str]:
        """Return the trays of ``subject`` that have hosts, in order. Raises `Missed` if there are none."""
        assert self._job.hosts is not None
        racks = subject.kind is Subjects.RACK
        named = {place.tray for place in self._scene.of(subject)} if racks else {subject.name}
        found = sorted(named & {*self._job.hosts.trays})
        if not found:
            raise Missed(f"{subject} has no host")
        return found

    # -- storage, state, clocks
    def fill_disk(self) -> Injected:
        return Filled(checkpoints_of(self._job), self._job.undo)

    def flip_in_checkpoint(self) -> Injected:
        return Flipped(partial(checkpoint_bit, checkpoints_of(self._job)), self._seed(), "checkpoint")

    def flip_in_snapshot(self) -> Injected:
        return All([self._in_snapshot(one, self._seed()) for one in self._subjects])

    def _in_snapshot(self, rank: Subject, seed: int) -> Flipped:
        for place in self._scene.of(rank):
            agent = self._job.agents().get(place.tray)
            if agent is not None:
                return Flipped(partial(snapshot_bit, agent, place.slot, place.incarnation), seed, f"snapshot of {rank}")
        raise Missed(f"nobody keeps the snapshots of {rank}")

    def move_clocks(self, by_s: float) -> Injected:
        assert self._job.clocks is not None, "the plan is known before the job is started"
        return Stepped(self._processes(), by_s, self._job.clocks, self._job.undo)
