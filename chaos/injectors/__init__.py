"""What faults take on a machine. Each writes down first how it is taken back, then strikes, then confirms that it took effect."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rackrun.chaos.conductor import Strike
from rackrun.chaos.faults import (
    CrashAt,
    DelayCollective,
    Fault,
    FlipBit,
    HoldGil,
    Kill,
    Pause,
    Preempt,
    Raise,
    Slow,
    Subjects,
    name_of,
)
from rackrun.chaos.injectors.orders import Ordered
from rackrun.chaos.injectors.seam import All, Injected, Missed, Outcome, whom
from rackrun.chaos.injectors.signals import Killed, Paused, Preempted
from rackrun.chaos.injectors.slow import ByQuota, ByTurns, quota_here
from rackrun.chaos.job import Job
from rackrun.chaos.points import POINTS
from rackrun.chaos.targets import Scene

__all__ = ["Injected", "Missed", "Outcome", "inject", "refusal"]


def refusal(fault: Fault, kind: Subjects) -> tuple[str, str] | None:
    """Why a real job cannot have ``fault`` at a ``kind``, and what to do about it; None: it can."""
    match fault:
        case Kill() | Pause() | Preempt():
            return None
        case Slow(share=share):
            return None if 0 < share < 1 else (f"a share of {share} is no slowness", "give one between 0 and 1")
        case CrashAt(point=point) if point not in POINTS:
            return f"there is no point {point!r}", f"give one of {', '.join(POINTS)}"
        case CrashAt() if kind not in (Subjects.RANK, Subjects.SPARE):
            return f"points are in workers, not in a {kind}", "name a rank or a spare, or use kill"
        case HoldGil() if kind is not Subjects.RANK:
            return "the GIL is held in a step, and a spare does none", "name a rank"
        case FlipBit(of=of) if of not in ("parameters", "gradients"):
            return f"bits of a {of} cannot be flipped yet", "flip one of parameters or gradients"
        case Raise() | HoldGil() | DelayCollective() | CrashAt() | FlipBit():
            return None
        case _:
            return f"{name_of(fault)} has no injector for real jobs", "rackctl chaos doctor shows those that have one"


def inject(strike: Strike, scene: Scene, job: Job, seed: Callable[[], int]) -> Injected:
    """Begin it. Raises `Missed` when there is nobody to strike, ``OSError`` when the machine refuses."""
    fault = strike.fault
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
        case Raise() | HoldGil() | DelayCollective() | CrashAt() | FlipBit():
            return Ordered(processes, strike.number, fault, seed(), job.inside, job.undo)
        case _:
            raise AssertionError(f"{fault} is refused at the start")
