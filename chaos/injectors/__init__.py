"""Carry faults out on this machine. Every injector first records how to undo its fault, then strikes, then confirms."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rackrun.chaos.faults.crash_points import POINTS, points_of
from rackrun.chaos.faults.fault_types import (
    CrashAt,
    DelayCollective,
    DiskFails,
    DiskFull,
    Duplicate,
    ExhaustMemory,
    Fault,
    FlipBit,
    GpuFails,
    HoldGil,
    Kill,
    Link,
    Partition,
    Pause,
    PoisonBatch,
    Preempt,
    Raise,
    Return,
    Slow,
    StepClock,
    Subjects,
    Xid,
    name_of,
)
from rackrun.chaos.faults.targets import Scene
from rackrun.chaos.injectors.common.injection import All, Injected, Missed, Outcome, whom
from rackrun.chaos.injectors.common.inprocess_orders import Ordered
from rackrun.chaos.injectors.network.network_faults import network_refusal, strike_network
from rackrun.chaos.injectors.processes.cpu_slowdown import ByQuota, ByTurns, quota_here
from rackrun.chaos.injectors.processes.return_and_duplicate import Doubled, Returned
from rackrun.chaos.injectors.processes.signals import Killed, Paused, Preempted
from rackrun.chaos.injectors.resources.gpu_errors import Reported, driver_refusal
from rackrun.chaos.injectors.resources.resource_faults import state_refusal, strike_state
from rackrun.chaos.plan.conductor import Strike
from rackrun.chaos.testbed.job_under_test import Job

__all__ = ["Injected", "Missed", "Outcome", "inject", "refusal"]


def refusal(fault: Fault, kind: Subjects) -> tuple[str, str] | None:  # noqa: PLR0911 - one for each reason
    """Return why a real job cannot have ``fault`` at a subject of this kind, and what to do about it; None if
    it can."""
    match fault:
        case Xid() | GpuFails():
            return driver_refusal()
        case Partition() | Link():
            return network_refusal(fault)
        case Slow(share=share) if not 0 < share < 1:
            return f"a share of {share} is no slowness", "give one between 0 and 1"
        case CrashAt(point=point) if point not in POINTS:
            return f"there is no point {point!r}", f"give one of {', '.join(POINTS)}"
        case CrashAt(point=point) if point not in points_of(kind):
            return f"a {kind} does not come to {point}", f"give one of {', '.join(points_of(kind))}"
        case HoldGil() if kind is not Subjects.RANK:
            return "the GIL is held in a step, and a spare does none", "name a rank"
        case DiskFails() | DiskFull() | ExhaustMemory() | FlipBit() | StepClock():
            return state_refusal(fault, kind)
        case Kill() | Pause() | Slow() | Preempt() | Return() | Duplicate():
            return None
        case Raise() | HoldGil() | DelayCollective() | CrashAt() | PoisonBatch():
            return None
        case _:
            return f"{name_of(fault)} has no injector for real jobs", "rackctl chaos doctor shows those that have one"


def inject(strike: Strike, scene: Scene, job: Job, seed: Callable[[], int]) -> Injected:  # noqa: PLR0911 - one for each kind
    """Begin a strike, and return its handle.

    ``seed`` returns the seed for what the fault draws at random. Raises `Missed` when there is nothing to strike, and
    ``OSError`` when the machine refuses.
    """
    fault = strike.fault
    match fault:
        case Return():
            return All([Returned(job, one.name) for one in strike.subjects])
        case Duplicate():
            return All([Doubled(job, one) for one in strike.subjects])
        case DiskFails() | DiskFull() | ExhaustMemory() | FlipBit() | StepClock():
            return strike_state(strike, fault, scene, job, seed)
        case Xid() | GpuFails():
            assert job.driver is not None, "a plan with such a fault brings one"
            slots = [place.slot for one in strike.subjects for place in scene.of(one)]
            if not slots:
                raise Missed(f"{', '.join(map(str, strike.subjects))} is nowhere")
            return Reported(job.driver, slots, fault, job.undo)
        case Partition() | Link():
            return strike_network(strike, fault, scene, job, seed)
        case _:
            pass
    processes = whom(job, scene, strike.subjects)
    match fault:
        case Kill(signal=name):
            return Killed(processes, signal.Signals[f"SIG{name}"])
        case Pause():
            return Paused(processes, job.undo)
        case Preempt(notice_s=notice_s):
            return All([Preempted(whom(job, scene, (one,)), notice_s) for one in strike.subjects])
        case Slow(share=share):
            above = quota_here(processes[0].pid)
            return ByTurns(processes, share, job.undo) if above is None else ByQuota(processes, share, job.undo, above)
        case Raise() | HoldGil() | DelayCollective() | CrashAt() | PoisonBatch():
            return Ordered(processes, strike.number, fault, seed(), job.inside, job.undo)
        case _:
            raise AssertionError(f"{fault} is refused at the start")
