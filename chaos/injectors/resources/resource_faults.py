"""Faults of what a job computes with and keeps: memory, clocks, the bits of its state, and checkpoint storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from rackrun.chaos.faults.fault_types import DiskFails, DiskFull, ExhaustMemory, FlipBit, StepClock, Subjects
from rackrun.chaos.faults.targets import Scene, Subject
from rackrun.chaos.injectors.common.injection import All, Injected, Missed, whom
from rackrun.chaos.injectors.common.inprocess_orders import Ordered
from rackrun.chaos.injectors.resources.bit_flips import Flipped, checkpoint_bit, snapshot_bit
from rackrun.chaos.injectors.resources.clock_jumps import Stepped
from rackrun.chaos.injectors.resources.memory_exhaustion import Confined, memory_here
from rackrun.chaos.injectors.resources.storage_faults import CALLS, Failing, Filled, checkpoints_of
from rackrun.chaos.plan.conductor import Strike
from rackrun.chaos.testbed.job_under_test import Job
from rackrun.chaos.testbed.machine.fake_clock import can_move
from rackrun.chaos.testbed.machine.leaked_resources import can_be_private
from rackrun.chaos.testbed.machine.processes import Process

__all__ = ["State", "state_refusal", "strike_state"]

State = DiskFails | DiskFull | ExhaustMemory | FlipBit | StepClock


def state_refusal(fault: State, kind: Subjects) -> tuple[str, str] | None:
    """Return why this machine or a job cannot have the fault, as `rackrun.chaos.injectors.refusal` does."""
    match fault:
        case FlipBit(of=of) if (of == "checkpoint") != (kind is Subjects.STORAGE):
            return f"a {kind} has no {of}", "name the storage for a checkpoint, and a rank for all else"
        case DiskFails(call=call, error=error) if error not in CALLS[call]:
            return f"a {call} does not end in {error}", f"give one of {', '.join(CALLS[call])}"
        case DiskFull() if not can_be_private():
            return "no file system can be mounted for the job alone", "run as root, with mount and unshare"
        case ExhaustMemory() if kind is not Subjects.RANK:
            return "memory is allocated in a step, and a spare does none", "name a rank"
        case ExhaustMemory() if memory_here(os.getpid()) is None:
            return (
                "no control group can be made that limits memory, and a limit of the process ends in an exception",
                "run as root, or in a control group of yours; or use raise with MemoryError",
            )
        case StepClock() if problem := can_move():
            return f"wall clocks of single processes cannot be moved: {problem}", "install a C compiler"
        case _:
            return None


def strike_state(strike: Strike, fault: State, scene: Scene, job: Job, seed: Callable[[], int]) -> Injected:
    """Begin one of these faults, as `rackrun.chaos.injectors.inject` does."""
    match fault:
        case DiskFull():
            return Filled(checkpoints_of(job), job.undo)
        case DiskFails():
            return Failing(fault, strike.number, job.inside, job.undo)
        case FlipBit(of="checkpoint"):
            return Flipped(partial(checkpoint_bit, checkpoints_of(job)), seed(), "checkpoint")
        case FlipBit(of="snapshot"):
            return All([_in_snapshot(job, scene, one, seed()) for one in strike.subjects])
        case _:
            processes = whom(job, scene, strike.subjects)
    match fault:
        case StepClock(by_s=by_s):
            assert job.clocks is not None, "the plan is known before the job is started"
            return Stepped(processes, by_s, job.clocks, job.undo)
        case ExhaustMemory():
            return All([_without_memory(job, one, strike.number, fault) for one in processes])
        case _:
            return Ordered(processes, strike.number, fault, seed(), job.inside, job.undo)


def _in_snapshot(job: Job, scene: Scene, rank: Subject, seed: int) -> Flipped:
    for place in scene.of(rank):
        agent = job.agents().get(place.tray)
        if agent is not None:
            return Flipped(partial(snapshot_bit, agent, place.slot, place.incarnation), seed, f"snapshot of {rank}")
    raise Missed(f"nobody keeps the snapshots of {rank}")


def _without_memory(job: Job, process: Process, number: int, fault: ExhaustMemory) -> Confined:
    above = memory_here(process.pid)
    if above is None:
        raise Missed(f"memory of process {process.pid} cannot be limited")
    order = partial(Ordered, [process], number, fault, 0, job.inside, job.undo)
    return Confined(process, order, job.undo, above)
