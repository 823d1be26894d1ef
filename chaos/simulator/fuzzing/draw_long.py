"""Draw jobs of thousands of units, with dozens of recoveries."""

from __future__ import annotations

import random

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.delay_collective import DelayCollective
from rackrun.chaos.faults.network.network_partition import Partition
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.return_tray import Return
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly, Last, One, Several, Target
from rackrun.chaos.plan.definition import AtStep, Inject, Now, Part, Plan, Seq, kind_of
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.protocol.job_config import JobConfig

__all__ = ["LONG", "a_long_job"]

RANK, SPARE, TRAY = Subjects.RANK, Subjects.SPARE, Subjects.TRAY
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
    faults: list[tuple[Fault, Target]] = [
        (Kill(), One(RANK)),
        (Kill(), Several(RANK, 2)),
        (Kill(), One(SPARE)),
        (Kill(), One(TRAY)),
        (Partition(shape="isolated", for_s=1.0), One(TRAY)),
    ]
    hangs = DelayCollective(for_s=10_000.0), Exactly(RANK, ("0",))
    parts: list[Part] = []
    for turn in range((units - _CYCLE // 2) // _CYCLE * (_HANGS + _OTHERS)):
        cycle, number = divmod(turn, _HANGS + _OTHERS)
        fault, target = hangs if number < _HANGS else draw.choice(faults)
        step = cycle * _CYCLE + number * _APART + draw.randint(5, 30)
        parts.append(Inject(fault=fault, target=target, when=AtStep(step=step, plus_s=0.3)))
        if kind_of(target) is TRAY and isinstance(fault, Kill):
            parts.append(Inject(fault=Return(), target=Last(TRAY), when=Now(plus_s=round(1 + draw.random(), 3))))
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
