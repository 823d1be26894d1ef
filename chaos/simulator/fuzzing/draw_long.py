"""Draw jobs of thousands of units, with dozens of recoveries."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import one_of
from rackrun.chaos.plan.definition import AtStep, Inject, Now, Part, Plan, Seq, kind_of
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.protocol.job_config import JobConfig

__all__ = ["LONG", "a_long_job"]

LONG = 1 / 80
"""The share of such jobs among all seeds."""
_CYCLE, _APART = 1_200, 40
_HANGS, _OTHERS = 9, 5
"""In each cycle of this many units, this many hangs and other faults strike, one every ``_APART`` units.

Slots that were left out then have the time to show that they are in order.
"""


def a_long_job(seed: int, draw: random.Random) -> SimulatedJob:
    """Draw a job of more than a thousand units, with dozens of recoveries.

    Its faults leave it time to recover, so it has to end well: no slot is left out for good, no checkpoint is kept
    forever, and rollbacks follow each other.
    """
    trays, slots = draw.randint(3, 4), draw.randint(1, 2)
    units = draw.randint(2_500, 5_500)
    shards = draw.choice(["replicas", "pairs", "unique"])
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=slots,
        snapshot_copies=draw.choice(["mirror", "mirror", "xor"]),
        set_size=2,
        start_over=True,
        max_restarts=100,
        no_progress_max=20,
    )
    parts: list[Part] = []
    for turn in range((units - _CYCLE // 2) // _CYCLE * (_HANGS + _OTHERS)):
        cycle, number = divmod(turn, _HANGS + _OTHERS)
        fault, target = one_of(Profile.LONG_HANGS if number < _HANGS else Profile.LONG, draw)
        step = cycle * _CYCLE + number * _APART + draw.randint(5, 30)
        parts.append(Inject(fault=fault, target=target, when=AtStep(step=step, plus_s=0.3)))
        if kind_of(target) is Subjects.TRAY and fault.loses:
            returns, tray = one_of(Profile.TRAY_RETURNS, draw)
            parts.append(Inject(fault=returns, target=tray, when=Now(plus_s=round(1 + draw.random(), 3))))
    return SimulatedJob(
        seed=seed,
        config=config,
        trays=trays,
        slots=slots,
        units=units,
        plan=Plan(plan=Seq(parts=tuple(parts)), seed=seed),
        shards=shards,
        snapshot_every=draw.choice([1, 2, 5]),
        checkpoint_every=draw.choice([10, 50]),
        faults_s=1e6,
        must_survive=True,
    )
