"""Draw jobs that begin again from storage on which the newest checkpoints may be damaged."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_row import FaultAndTarget
from rackrun.chaos.faults.fault_types import BaseFault
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import PLAIN_LOSS, one_of
from rackrun.chaos.faults.targets import A_TRAY
from rackrun.chaos.plan.definition import AtStep, Inject, Par, Plan
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.protocol.job_config import JobConfig

__all__ = ["a_job_with_a_damaged_checkpoint"]


def a_job_with_a_damaged_checkpoint(seed: int, draw: random.Random) -> SimulatedJob:
    """Draw a job that loses a tray, and with it the only copy in memory of some ranks' state.

    A checkpoint is damaged about then. Mostly there are spares for the lost ranks, so all begin again from storage.
    """
    trays, slots = draw.randint(2, 4), draw.randint(1, 2)
    step = draw.randint(4, 15)

    def strike(what: FaultAndTarget[BaseFault], at: int) -> Inject:
        return Inject(fault=what[0], target=what[1], when=AtStep(step=at, plus_s=round(draw.random(), 3)))

    damages = [strike(one_of(Profile.DAMAGED_CHECKPOINT, draw), step - draw.randint(0, 3)) for _ in range(2)]
    parts = (*damages[: draw.randint(1, 2)], strike((PLAIN_LOSS, A_TRAY), step))
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=slots if draw.random() < 0.8 else 0,
        snapshot_copies="local",
        min_ranks=1,
        start_over=True,
        max_restarts=4,
    )
    return SimulatedJob(
        seed=seed,
        config=config,
        trays=trays,
        slots=slots,
        units=25,
        plan=Plan(plan=Par(parts=parts), seed=seed),
        shards="unique",
        snapshot_every=draw.choice([1, 2, 3]),
        checkpoint_every=draw.choice([1, 1, 2, 3]),
        exact=draw.random() < 0.7,
        reenters=draw.random() < 0.5,
    )
