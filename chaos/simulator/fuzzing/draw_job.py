"""Draw a job and its faults from a seed: first which families of faults occur, then how often, then everything else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import msgspec

from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.table.fault_table import PLAIN_LOSS, Fault, one_of, row_of, variants_of
from rackrun.chaos.faults.targets import A_RANK, A_TRAY, Several, Target
from rackrun.chaos.plan.definition import AtStep, Budget, Every, Inject, Now, Par, Part, Plan, Quiet, Seq
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob
from rackrun.chaos.simulator.fuzzing.draw_corruption import left_with_two, with_corruption
from rackrun.chaos.simulator.fuzzing.draw_damage import a_job_with_a_damaged_checkpoint
from rackrun.chaos.simulator.fuzzing.draw_long import LONG, a_long_job
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.job_config import JobConfig

__all__ = ["draw_job"]

_COPIES: tuple[Literal["local", "mirror", "xor", "rs"], ...] = ("mirror", "mirror", "xor", "rs", "local")
FAMILIES = (
    Profile.KILLS,
    Profile.ERRORS,
    Profile.CRASHES,
    Profile.HANGS,
    Profile.SLOW,
    Profile.TRAYS,
    Profile.NETWORK,
    Profile.CONTROL,
    Profile.HARDWARE,
    Profile.ROT,
    Profile.LEAVING,
)
_LOSE_TRAYS = (Profile.TRAYS, Profile.NETWORK, Profile.LEAVING)
LEFT_WITH_TWO = 0.02
"""The share of jobs in which three replicas become two, and one of these is wrong."""
DAMAGED_CHECKPOINT = 0.01
"""The share of jobs that lose state of which there is a checkpoint, about when one is damaged."""
_FEW = (Profile.FEW_WORKERS, Profile.FEW_CONNECTIONS)


def _one_of(family: Profile, draw: random.Random) -> tuple[Fault, Target]:
    for_s = draw.choice([None, 1.0, 4.0, 20.0])
    choices = {one: variants_of(one, draw, for_s) for one in FAMILIES}
    return draw.choice(choices[family])


def _faults(draw: random.Random) -> Part:
    families = [family for family in FAMILIES if draw.random() < 0.35] or [draw.choice(FAMILIES)]
    parts: list[Part] = []
    for family in families:
        for _ in range(draw.randint(1, 2)):
            fault, target = _one_of(family, draw)
            strike: Part = Inject(fault=fault, target=target)
            loses_tray = family in _LOSE_TRAYS and draw.random() < 0.6
            if loses_tray and (
                fault.loses or not row_of(fault).by_signals
            ):  # who is stopped by a signal is still there
                returns, tray = one_of(Profile.TRAY_RETURNS, draw)
                back = Inject(fault=returns, target=tray, when=Now(plus_s=round(draw.random() * 40, 3)))
                strike = Seq(parts=(strike, back))
            parts.append(Every(mean_s=draw.choice([3.0, 10.0, 30.0]), part=strike, times=draw.randint(1, 5)))
    if draw.random() < 0.1:  # two workers are lost that start together
        parts.append(Inject(fault=PLAIN_LOSS, target=Several(Subjects.RANK, 2), when=AtStep(step=draw.randint(0, 12))))
    if draw.random() < 0.1:  # a tray that its peers do not reach, while all ranks have to come together again
        when = AtStep(step=draw.randint(0, 12))
        cut, tray = one_of(Profile.CUT_FROM_PEERS, draw)
        parts.append(Inject(fault=cut, target=tray, when=when))
        parts.append(Inject(fault=PLAIN_LOSS, target=A_RANK, when=when))
    faults: Part = Par(parts=tuple(parts))
    if draw.random() < 0.85:  # otherwise the faults strike while all workers start
        faults = Seq(parts=(Quiet(steps=draw.randint(1, 6)), faults))
    return faults


def _few_faults(draw: random.Random) -> Part:
    """Draw a few faults that spares and replicas can deal with."""
    faults = [variant for family in _FEW for variant in variants_of(family, draw)]
    parts: list[Part] = []
    for turn in range(draw.randint(1, 4)):
        fault, target = draw.choice(faults)
        parts.append(Inject(fault=fault, target=target, when=AtStep(step=4 * turn, plus_s=round(4 * draw.random(), 3))))
    return Seq(parts=tuple(parts))


def draw_job(seed: int) -> SimulatedJob:
    """Draw the job of a seed."""
    if stream(seed, "swarm", "long").random() < LONG:
        return a_long_job(seed, stream(seed, "swarm", "of weeks"))
    two = stream(seed, "swarm", "left with two")
    if two.random() < LEFT_WITH_TWO:
        return left_with_two(_without_disk(seed), two)
    damage = stream(seed, "swarm", "damaged checkpoint")
    if damage.random() < DAMAGED_CHECKPOINT:
        return a_job_with_a_damaged_checkpoint(seed, damage)
    return with_corruption(_with_or_without_disk(seed), stream(seed, "swarm", "corruption"))


def _with_or_without_disk(seed: int) -> SimulatedJob:
    job, draw = _without_disk(seed), stream(seed, "swarm", "disk")
    if draw.random() < 0.6:
        return job
    config = msgspec.structs.replace(job.config, start_over=True)
    plan = job.plan if job.must_survive or draw.random() < 0.5 else _with_disk(job.plan, draw)
    return replace(job, config=config, plan=plan, checkpoint_every=draw.randint(1, 5))


def _with_disk(plan: Plan, draw: random.Random) -> Plan:
    """Add faults of the storage and, at times, losses after which no state is left in memory."""
    fault, target = draw.choice(variants_of(Profile.DISK, draw, draw.choice([1.0, 10.0, 60.0])))
    fails = Inject(fault=fault, target=target)
    parts: list[Part] = [plan.plan, Every(mean_s=15.0, part=fails, times=draw.randint(1, 3))]
    if draw.random() < 0.5:
        when = AtStep(step=draw.randint(3, 15))
        parts.append(Inject(fault=PLAIN_LOSS, target=Several(Subjects.RANK, 2), when=when))
        parts.append(Inject(fault=PLAIN_LOSS, target=A_TRAY, when=when))
    return msgspec.structs.replace(plan, plan=Par(parts=tuple(parts)))


def _without_disk(seed: int) -> SimulatedJob:
    draw = stream(seed, "swarm")
    if draw.random() < 0.15:
        return _a_job_that_survives(seed, draw)
    trays, slots = draw.randint(1, 5), draw.randint(1, 3)
    slots = 2 if trays * slots == 1 else slots
    racks = draw.random() < 0.3
    pairs = (trays * slots - 1) // 2
    tied = racks and slots > 1 and pairs > 0 and draw.random() < 0.4
    shards = draw.choice(["replicas", "replicas", "pairs", "unique"])
    copies = draw.choice(_COPIES)
    rented = _provider(stream(seed, "swarm", "provider"))
    config = JobConfig(
        trays_min=trays,
        trays_max=trays,
        spares=0 if tied else draw.randint(0, min(4, trays * slots - 1)),
        mesh=(("dp", draw.randint(1, pairs)), ("tp", 2)) if tied else (),
        cross_clique=draw.random() < 0.2,
        slow_ranks=draw.choice(["notice", "swap", "swap", "off"]),
        snapshot_copies=copies,
        set_size=draw.randint(3, 5) if copies == "rs" else draw.randint(2, 5),
        set_parity=2 if copies == "rs" else 1,
        min_ranks=draw.choice([0, 1, 2]),
        max_restarts=draw.choice([0, 1, 4]),
        start_over=draw.random() < 0.7,
        no_progress_max=draw.choice([4, 20]),
        rules=parse_rules(draw.choice(["", "", "swap,move,shrink,wait,restart", "no-restart"])),
        policy_function="policy:choose" if draw.random() < 0.1 else "",
        repair_patience_ms=draw.choice([0, 0, 20_000]),
    )
    if rented:
        config = msgspec.structs.replace(config, **rented, spares=min(config.spares, 1))
    patience = stream(seed, "swarm", "patience")
    if patience.random() < 0.2:  # shorter than a start, so that recoveries come to the end of their time
        config = msgspec.structs.replace(
            config,
            join_timeout_ms=patience.choice([2_000, 5_000, 12_000]),
            repair_patience_ms=0,
            max_restarts=4,
            start_over=True,
        )
    hold = stream(seed, "swarm", "hold")
    if hold.random() < 0.1:
        order = hold.choice(["swap,hold", "swap,move,wait,hold", "swap,shrink,hold,restart"])
        config = msgspec.structs.replace(config, rules=parse_rules(order))
    return SimulatedJob(
        seed=seed,
        config=config,
        trays=trays,
        slots=slots,
        units=draw.randint(5, 40),
        plan=Plan(plan=_faults(draw), seed=seed),
        shards="pairs" if tied else shards,
        exact=draw.random() < 0.7,
        reenters=draw.random() < 0.5,
        snapshot_every=draw.choice([1, 2, 3]),
        faults_s=draw.choice([20.0, 60.0, 120.0]),
        requests=draw.choice([0, 0, 0, 4]),
        racks=racks,
        drift=draw.choice([0.0, 0.001, 0.2]),
    )


def _provider(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {}
    return {
        "provider": "somewhere",
        "provider_expected_s": draw.choice([None, 0.1, 30.0, 1e5]),
        "acquire_timeout_ms": draw.choice([10_000, 120_000, 3_600_000]),
        "rack_join_ms": draw.choice([1_000, 120_000]),
        "rules": parse_rules(draw.choice(["", "swap,acquire,restart", "acquire-train,shrink", "acquire-wait,shrink"])),
    }


def _a_job_that_survives(seed: int, draw: random.Random) -> SimulatedJob:
    trays, slots = draw.randint(2, 4), draw.randint(2, 3)
    spares = draw.randint(1, 2)
    config = JobConfig(trays_min=trays, trays_max=trays, spares=spares)
    plan = Plan(plan=_few_faults(draw), seed=seed, budget=Budget(slots=spares))
    units = draw.randint(20, 40)
    return SimulatedJob(
        seed=seed, config=config, trays=trays, slots=slots, units=units, plan=plan, faults_s=600.0, must_survive=True
    )
