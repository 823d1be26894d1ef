"""Add GPUs that corrupt state to drawn jobs, some of which compare replicas (``--check-replicas``)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import msgspec

from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import Every, Inject, Now, Par, Quiet, Seq
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.protocol.ids import SlotId

__all__ = ["with_corruption"]

RANK = Subjects.RANK
_OF: tuple[Literal["parameters", "gradients"], ...] = ("parameters", "parameters", "parameters", "gradients")


def with_corruption(job: SimulatedJob, draw: random.Random) -> SimulatedJob:
    """Return the job, in a quarter of cases with corrupting GPUs or losses that are not finite; most of these compare
    replicas."""
    if draw.random() < 0.75:
        return job
    if job.must_survive:
        return _with_one_flip(job, draw)
    every = draw.choice([0, 1, 1, 2, 3, 5])
    of = draw.choice(_OF)
    strike = Inject(fault=FlipBit(of=of), target=One(RANK))
    flips = Every(mean_s=draw.choice([5.0, 15.0, 60.0]), part=strike, times=draw.randint(1, 4))
    plan = msgspec.structs.replace(job.plan, plan=Par(parts=(job.plan.plan, Seq(parts=(Quiet(steps=3), flips)))))
    if draw.random() < 0.5:  # few other faults strike it
        plan = msgspec.structs.replace(plan, plan=Seq(parts=(Quiet(steps=3), flips)))
    wrong = {}
    if draw.random() < 0.3:
        slots = [f"tray-{tray}/{index}" for tray in range(job.trays) for index in range(job.slots)]
        wrong = {SlotId(draw.choice(slots)): draw.randint(4, 12)}
    shards = draw.choice(["replicas", "replicas", "pairs", job.shards])
    return replace(
        job,
        plan=plan,
        check_replicas=every,
        wrong=wrong,
        shards="pairs" if job.config.mesh else shards,
        units=job.units + 10,
    )


def _with_one_flip(job: SimulatedJob, draw: random.Random) -> SimulatedJob:
    """Add one flip after all other faults. It must be found: nothing of it may be left at the end."""
    flip = Inject(fault=FlipBit(of="parameters"), target=One(RANK), when=Now(plus_s=round(5 * draw.random(), 3)))
    plan = msgspec.structs.replace(job.plan, plan=Seq(parts=(job.plan.plan, Quiet(steps=4), flip)))
    return replace(job, plan=plan, check_replicas=draw.randint(1, 4))
