"""Add GPUs that corrupt state to drawn jobs, some of which compare replicas (``--check-replicas``)."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from rackrun.chaos.faults.fault_row import FaultAndTarget
from rackrun.chaos.faults.fault_types import BaseFault
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import PLAIN_LOSS, one_of
from rackrun.chaos.faults.targets import A_RANK
from rackrun.chaos.plan.definition import AtStep, Every, Inject, Now, Par, Quiet, Seq
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.ids import SlotId
from rackrun.protocol.job_config import JobConfig

__all__ = ["left_with_two", "with_corruption"]


def with_corruption(job: SimulatedJob, draw: random.Random) -> SimulatedJob:
    """Return the job, in a quarter of cases with corrupting GPUs or losses that are not finite; most of these compare
    replicas."""
    if draw.random() < 0.75:
        return job
    if job.must_survive:
        return _with_one_flip(job, draw)
    every = draw.choice([0, 1, 1, 2, 3, 5])
    fault, target = one_of(Profile.CORRUPT_STATE, draw)
    strike = Inject(fault=fault, target=target)
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
    fault, target = one_of(Profile.CORRUPT_PARAMETERS, draw)
    flip = Inject(fault=fault, target=target, when=Now(plus_s=round(5 * draw.random(), 3)))
    plan = msgspec.structs.replace(job.plan, plan=Seq(parts=(job.plan.plan, Quiet(steps=4), flip)))
    return replace(job, plan=plan, check_replicas=draw.randint(1, 4))


def left_with_two(job: SimulatedJob, draw: random.Random) -> SimulatedJob:
    """Return a job of three replicas that are compared at every step, so that they keep no snapshots.

    One is lost right after a gate that the others do not always see pass, and the state of another flips about when
    the two do its step again. In half of the jobs one of them is lost too, perhaps the one that is right.
    """
    step = draw.randint(4, 8)

    def strike(what: FaultAndTarget[BaseFault], plus_s: float) -> Inject:
        return Inject(fault=what[0], target=what[1], when=AtStep(step=step, plus_s=round(plus_s, 3)))

    first = strike(one_of(Profile.AFTER_GATE, draw), 0.1)
    flips = strike(one_of(Profile.CORRUPT_PARAMETERS, draw), 1.15 + 0.8 * draw.random())
    last = strike((PLAIN_LOSS, A_RANK), 2 + draw.random())
    parts = (first, flips, last) if draw.random() < 0.5 else (first, flips)
    config = JobConfig(
        trays_min=3,
        trays_max=3,
        spares=0,
        min_ranks=1,
        start_over=draw.random() < 0.7,
        rules=parse_rules("swap,shrink,restart"),
    )
    return SimulatedJob(
        seed=job.seed,
        config=config,
        trays=3,
        slots=1,
        units=25,
        plan=msgspec.structs.replace(job.plan, plan=Par(parts=parts)),
        checkpoint_every=draw.choice([0, 2, 3]),
        check_replicas=1,
    )
