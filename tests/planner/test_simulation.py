"""What a job on a fleet goes through: each rung, with its time, its rollback, and what stays whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.planner.analysis.simulation_case import Case, simulate
from rackrun.chaos.planner.inputs.failures import FailureProcess, UnitFailure
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob, fleet_of
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.model.fleet_state import FleetState
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome
from rackrun.chaos.planner.model.undisturbed_training import TrainingTimes, progress
from rackrun.core.policy.choice import choose
from rackrun.protocol.policy_types import ClusterView, Decision, Failure
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.placement.objective import Fitness
from rackrun.topology.placement.rank_assignment import place
from tests.planner.cases import HOUR, NEVER, case, trays

COSTS = PlanCosts(
    step_s=10.0,
    detect_s=15.0,
    regroup_s=5.0,
    takeover_s=20.0,
    reenter_s=30.0,
    start_s=120.0,
    load_s=100.0,
    checkpoint_s=0.0,
    snapshot_s=0.0,
    copy_s=0.0,
    write_s=0.0,
)
RACK, TRAY, GPU = "rack", "tray", "gpu"


def struck(
    *strikes: tuple[float, UnitFailure], days: float = 1.0, every: Intervals = NEVER, **more: object
) -> FleetOutcome:
    """By hours."""
    job = more.pop("job", FleetJob(group=8, replica=16, spares_per_rack=8))
    costs = more.pop("costs", COSTS)
    racks = int(str(more.pop("racks", 2)))
    one = case(racks=racks, days=days, job=job, costs=costs, intervals=every, **more)  # type: ignore[arg-type]
    trace = tuple((hours * HOUR, strike) for hours, strike in strikes)
    return simulate(msgspec.structs.replace(one, trace=trace), 0, checked=True)


def tray(unit: int, repair_h: float = 4.0) -> UnitFailure:
    return UnitFailure(0, TRAY, unit, repair_h * HOUR)  # type: ignore[arg-type]


def test_a_lost_tray_costs_its_detection_a_takeover_and_the_step_that_broke() -> None:
    outcome = struck((1 + 4 / 3600, tray(0)))
    assert outcome.rungs == {"swap": 1}
    where = outcome.where
    assert (where.detecting, where.recovering, where.redone, where.waiting) == (15.0, 20.0, 0.0, 0.0)
    assert where.broken == pytest.approx(4.0 + (86400 - 3604 - 35) % 10)
    assert where.productive == outcome.steps * 10.0
    assert where.total() == pytest.approx(86400)


def test_a_spare_s_tray_costs_nothing() -> None:
    outcome = struck((1.0, tray(17)))
    assert (outcome.rungs, outcome.breaks, outcome.strikes) == ({}, 0, 1)


def test_trays_that_fail_within_one_detection_are_one_decision() -> None:
    outcome = struck((1.0, tray(0)), (1.002, tray(20)))
    assert (outcome.rungs, outcome.breaks) == ({"swap": 1}, 1)
    assert outcome.where.detecting == 15.0


def test_a_loss_in_the_middle_of_a_recovery_begins_it_anew() -> None:
    outcome = struck((1.0, tray(0)), (1 + 25 / 3600, tray(1)))
    assert (outcome.rungs, outcome.breaks) == ({"swap": 2}, 1)
    assert outcome.where.detecting == 30.0
    assert outcome.where.recovering == pytest.approx(10.0 + 20.0)


def test_without_a_spare_the_world_shrinks_and_grows_again() -> None:
    job = FleetJob(group=4, replica=4, exact=True, micro_batches=36)
    outcome = struck((1.0, tray(0)), job=job)
    assert outcome.rungs == {"grow": 1, "shrink": 1}
    away_s = 4 * HOUR + 120
    assert outcome.short_s == pytest.approx(away_s - 15 - 35, abs=1)
    assert outcome.where.slowed == pytest.approx(
        outcome.short_s * (1 - 36 / 38), rel=0.01
    )  # 38 micro-batches where there were 36
    assert outcome.where.recovering == 35.0 + 50.0


def test_after_a_shrink_some_ranks_have_a_micro_batch_more_and_all_wait_for_them() -> None:
    coarse = struck((1.0, tray(0)), job=FleetJob(group=4, replica=4, exact=True, micro_batches=2))
    fine = struck((1.0, tray(0)), job=FleetJob(group=4, replica=4, exact=True, micro_batches=0))
    assert coarse.where.slowed == pytest.approx(coarse.short_s / 3, rel=0.01)  # 3 where there were 2
    assert fine.where.slowed == pytest.approx(fine.short_s / 36, rel=0.01)


def test_who_may_not_shrink_waits_for_the_repair() -> None:
    job = FleetJob(group=4, replica=4, min_ranks=0, wait_for_hardware_s=8 * HOUR)
    outcome = struck((1.0, tray(0)), job=job)
    assert outcome.rungs == {"swap": 1, "wait": 1}
    assert outcome.where.waiting == pytest.approx(4 * HOUR + 120 - 15)


def test_a_wait_that_is_too_short_ends_the_job_and_somebody_launches_it_again() -> None:
    job = FleetJob(group=4, replica=4, min_ranks=0, wait_for_hardware_s=HOUR)
    outcome = struck((1.0, tray(0)), job=job, every=Intervals(snapshot=0, checkpoint=30))
    assert outcome.rungs == {"relaunch": 1, "stop": 1, "wait": 1}
    assert outcome.where.waiting == pytest.approx(HOUR - 15)
    assert outcome.where.stopped == pytest.approx(3 * HOUR)  # its size is fixed: until the tray is back
    assert outcome.where.redone <= 300


def test_a_hold_lasts_until_the_repair_whatever_time_was_given() -> None:
    job = FleetJob(group=4, replica=4, min_ranks=0, wait_for_hardware_s=HOUR)
    outcome = struck((1.0, tray(0)), job=job, policy="swap,hold")
    assert outcome.rungs == {"hold": 1, "swap": 1}
    assert outcome.where.waiting == pytest.approx(4 * HOUR + 120 - 15)


def test_a_job_that_is_launched_again_takes_what_there_is_and_grows() -> None:
    job = FleetJob(group=4, replica=4, wait_for_hardware_s=HOUR)
    outcome = struck((1.0, tray(0)), job=job, every=Intervals(snapshot=0, checkpoint=30), policy="swap,wait,stop")
    assert outcome.rungs == {"grow": 1, "relaunch": 1, "stop": 1, "wait": 1}
    assert outcome.where.stopped == pytest.approx(HOUR)


def test_the_user_s_order_is_what_is_taken() -> None:
    assert struck((1.0, tray(0)), policy="restart").rungs == {"restart": 1}
    assert struck((1.0, tray(0)), policy="no-swap,no-restart,no-wait").rungs == {"grow": 1, "shrink": 1}


def test_a_restart_goes_back_to_the_newest_checkpoint_that_was_whole() -> None:
    every = Intervals(snapshot=0, checkpoint=30)
    at_once = struck((1 + 70 / 3600, tray(0)), policy="restart", every=every)
    assert at_once.where.redone == 60 + 10  # step 367, of which 360 are on disk
    late = struck(
        (1 + 70 / 3600, tray(0)), policy="restart", every=every, costs=msgspec.structs.replace(COSTS, write_s=100.0)
    )
    assert late.where.redone == 60 + 10 + 300
    assert late.where.recovering == 220.0


def test_snapshots_take_everybody_back_where_state_has_no_replica() -> None:
    every = Intervals(snapshot=20, checkpoint=30)
    job = FleetJob(group=8, replica=16, spares_per_rack=8, state="mirror")
    outcome = struck((1 + 70 / 3600, tray(0)), job=job, every=every)
    assert outcome.rungs == {"swap": 1}
    assert outcome.where.redone == 70
    slow = msgspec.structs.replace(COSTS, copy_s=71.0)
    rarely = Intervals(snapshot=20, checkpoint=300)
    assert struck((1 + 70 / 3600, tray(0)), job=job, every=rarely, costs=slow).where.redone == 270


def test_a_restart_is_taken_where_the_core_finds_it_cheaper_than_a_rollback() -> None:
    job = FleetJob(group=8, replica=16, spares_per_rack=8, state="mirror")
    slow = msgspec.structs.replace(COSTS, copy_s=71.0)
    outcome = struck((1 + 70 / 3600, tray(0)), job=job, every=Intervals(snapshot=20, checkpoint=30), costs=slow)
    assert outcome.rungs == {"restart": 1}
    assert outcome.where.redone == 70


def test_a_tray_and_the_next_one_take_snapshot_and_copy_with_them() -> None:
    """The core's mirrors lie on the next tray in order: a whole rack takes nearly all of its copies along."""
    every = Intervals(snapshot=20, checkpoint=30)
    job = FleetJob(group=8, replica=16, spares_per_rack=16, spare_racks=1, state="mirror")
    lost = UnitFailure(0, RACK, 0, 4 * HOUR)  # type: ignore[arg-type]
    apart = struck((1.0, tray(0)), (1.001, tray(5)), job=job, every=every, racks=3)
    beside = struck((1.0, tray(0)), (1.001, tray(1)), job=job, every=every, racks=3)
    rack = struck((1.0, lost), job=job, every=every, racks=3)
    assert (apart.rungs, beside.rungs, rack.rungs) == ({"swap": 1}, {"restart": 1}, {"restart": 1})
    live = struck((1.0, lost), job=msgspec.structs.replace(job, state="replicas"), every=every, racks=3)
    assert "restart" not in live.rungs


def test_a_dead_process_leaves_its_slot_and_its_tray_s_memory() -> None:
    dead = UnitFailure(0, GPU, 0, 0.0)  # type: ignore[arg-type]
    every = Intervals(snapshot=20, checkpoint=30)
    job = FleetJob(group=8, replica=16, spares_per_rack=8, state="mirror")
    outcome = struck((1.0, dead), (1.001, tray(1)), job=job, every=every)
    assert outcome.rungs == {"swap": 1}


def test_a_stall_is_absorbed() -> None:
    outcome = struck((1.0, UnitFailure(0, RACK, 0, 0.0, stalls=True)))  # type: ignore[arg-type]
    assert outcome.rungs == {"absorb": 1}
    assert (outcome.where.recovering, outcome.where.redone) == (5.0, 0.0)


def test_a_group_that_finds_no_spare_in_its_rack_moves() -> None:
    job = FleetJob(group=64, replica=64, spare_racks=1)
    outcome = struck((1.0, tray(0)), (2.0, tray(1)), (3.0, tray(2)), job=job)
    assert outcome.rungs == {"move": 1, "swap": 2}
    assert outcome.where.recovering == 20 + 20 + 25


def prefers_to_wait(failure: Failure, view: ClusterView) -> Decision:
    assert failure.slots == ("r00000-t00/0", "r00000-t00/1", "r00000-t00/2", "r00000-t00/3")
    assert (view.world_size, view.usable_slots, len(view.takeovers)) == (128, 140, 4)
    return choose(failure, view)


def answers_nonsense(failure: Failure, view: ClusterView) -> str:
    return "swap"


def test_a_function_of_the_user_s_is_asked() -> None:
    assert struck((1.0, tray(0)), policy=f"{__name__}:prefers_to_wait").rungs == {"swap": 1}
    with pytest.raises(PlannerError, match="returned a str"):
        struck((1.0, tray(0)), policy=f"{__name__}:answers_nonsense")
    with pytest.raises(PlannerError, match="cannot be loaded"):
        struck((1.0, tray(0)), policy="no_such_module:choose")


# -- who sits where ----------------------------------------------------------------------------------------------------
def test_takeovers_are_those_that_the_placement_answers() -> None:
    """Hundreds of losses and repairs, with moves between racks; after each the same question to `rackrun.topology.placement.rank_assignment`."""
    fleet = Fleet(racks=8, trays=6)
    job = FleetJob(group=8, replica=8, spares_per_rack=4, spare_racks=1)
    hall, draw = FleetState(fleet, job), stream(11, "hall")
    down: set[int] = set()
    asked = moved = short = 0
    for _ in range(1200):
        unit = draw.randrange(fleet.total_trays)
        slots = range(4 * unit, 4 * unit + 4)
        if unit in down and draw.random() < 0.7:
            hall.repaired(slots)
            hall.started(hall.stamps(slots))
            down.discard(unit)
        elif unit not in down and len(down) < 22:
            hall.strike(slots, hardware=True)
            down.add(unit)
        if not hall.lost:
            continue
        asked += 1
        waits = {hall.board.slots[slot] for slot in np.flatnonzero(hall._ready).tolist()}
        sits = {hall.board.slots[int(slot)] for rank, slot in enumerate(hall.seats) if rank not in hall.lost}
        bad: dict[str, Fitness] = dict.fromkeys(set(hall.board.slots) - waits - sits, Fitness.BAD)
        names = [hall.board.slots[int(slot)] for slot in hall.seats]
        staff = hall.staff()
        try:
            expected = place(hall.board, job.mesh(hall.replicas), health=bad, previous=names)
        except DoesNotFit:
            assert staff is None
            short += 1
            hall.drop(hall.hit())
            hall.started(hall.stamps(hall.in_order(range(fleet.total_gpus))))
            hall.join(hall.joinable())
        else:
            assert staff is not None
            moves = {int(move.rank): hall.board.number[move.target] for move in expected.moves}
            assert staff.takeovers | staff.uprooted == {
                rank: moves.get(rank, int(hall.seats[rank])) for rank in {*moves, *hall.lost}
            }
            moved += bool(staff.uprooted)
            left = hall.take(staff)
            hall.started(hall.stamps(left))
        hall.check()
    assert min(asked - moved - short, moved, short) > 4


def test_a_rank_that_is_lost_already_is_not_lost_again_with_its_slot() -> None:
    """Its process died, another waits on the slot as a spare, and then the tray fails: nobody more is lost."""
    fleet, job = Fleet(racks=2, trays=4), FleetJob(group=4, replica=8, spares_per_rack=4)
    hall = FleetState(fleet, job)
    rank, slot = 3, int(hall.seats[3])
    assert hall.strike(range(slot, slot + 1), hardware=False) == [rank]
    assert hall.started(hall.stamps([slot])) == 1
    tray = hall.tray_of(slot)
    others = [other for other in range(hall.ranks) if other != rank and hall.tray_of(int(hall.seats[other])) == tray]
    slots = range(tray * fleet.gpus, (tray + 1) * fleet.gpus)
    assert sorted(hall.strike(slots, hardware=True)) == others
    assert hall.strike(slots, hardware=True) == []
    assert sorted(hall.lost) == sorted([rank, *others])
    hall.check()


@pytest.mark.parametrize(("group", "spares"), [(8, 8), (16, 4), (64, 8), (4, 0)])
def test_the_shortcut_answers_as_the_solver_does(group: int, spares: int) -> None:
    job = FleetJob(group=group, replica=64, spares_per_rack=spares, exact=True)
    one = case(trays(300, 8), racks=6, job=job, costs=COSTS, days=20)
    assert simulate(one, 5, checked=True) == simulate(one, 5, shortcut=False)


@pytest.mark.parametrize("policy", ["", "shrink", "restart", "swap,restart", "move,restart", "wait,shrink"])
def test_what_the_hall_knows_of_seats_changes_no_answer_of_the_solver(policy: str) -> None:
    """Groups that move, worlds that shrink and grow, and whole worlds that begin again, on a fleet with one rack to spare. Who takes over
    is asked of the solver only where the policy may need it; without the shortcut, each time."""
    job = FleetJob(group=8, replica=16, spare_racks=1, exact=True)
    rack = FailureProcess(name="rack", domain="rack", mtbf_s=900 * HOUR, repair_s=8 * HOUR)
    process = FailureProcess(name="process", domain="gpu", mtbf_s=20_000 * HOUR)
    one = case(trays(300, 12), rack, process, racks=6, job=job, costs=COSTS, days=20, policy=policy)
    found = simulate(one, 5, checked=True)
    assert found == simulate(one, 5, shortcut=False)
    reached = {"": "move", "shrink": "grow", "move,restart": "move", "wait,shrink": "shrink"}
    assert reached.get(policy, "restart") in found.rungs


# -- reproducible, and bad input -----------------------------------------------------------------------------------
def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    rack = FailureProcess(name="rack", domain="rack", mtbf_s=500 * HOUR, repair_s=8 * HOUR)
    one = case(trays(500, 8, lemons=0.1, lemon_factor=5.0), rack, racks=6, crews=3, costs=COSTS)
    here = simulate(one, 7)
    program = (
        "import sys, msgspec; from rackrun.chaos.planner.analysis.simulation_case import Case, simulate; "
        "print(msgspec.json.encode(simulate(msgspec.json.decode(sys.stdin.buffer.read(), type=Case), 7)).decode())"
    )
    root = Path(__file__).resolve().parents[2]
    there = subprocess.run(
        [sys.executable, "-c", program],
        input=msgspec.json.encode(one),
        capture_output=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "99"},
    )
    assert msgspec.json.decode(there.stdout, type=FleetOutcome) == here
    assert simulate(one, 8) != here


def test_ten_thousand_gpus_for_thirty_days_are_a_few_events_for_each_failure() -> None:
    """One for a failure, a repair, a start, the knowledge of it, the end of the recovery: none for a step or a heartbeat."""
    mtbf_s = 8 * HOUR * 365 * 24 / 12  # a tray fails every eight months
    tray_fails = FailureProcess(name="tray", domain="tray", mtbf_s=mtbf_s, repair_s=4 * HOUR)
    one = Case(fleet=fleet_of(10_008), job=FleetJob(spares_per_rack=8, group=8), processes=(tray_fails,))
    outcome = simulate(one, 1)
    assert outcome.strikes > 200
    assert outcome.events < 6 * outcome.strikes
    assert outcome.where.total() == pytest.approx(30 * 86400)


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"spares_per_rack": 73}, "a rack of 72 GPUs cannot hold back 73 spares"),
        ({"spares_per_rack": -1}, "spares_per_rack -1"),
        ({"spare_racks": 4}, "4 spare racks leave none of 4 racks"),
        ({"group": 0}, "group 0"),
        ({"group": 8, "replica": 12}, "not made of groups"),
        ({"group": 80, "replica": 80}, "no replica of 80"),
        ({"wait_for_hardware_s": float("inf")}, "wait for hardware"),
    ],
)
def test_a_job_that_cannot_be_is_refused(job: dict[str, float], what: str) -> None:
    with pytest.raises(PlannerError, match=r"Remedy: .+") as refused:
        FleetJob(**job).replicas(Fleet(racks=4))  # type: ignore[arg-type]
    assert what in str(refused.value)


@pytest.mark.parametrize(
    "wrong", [{"step_s": 0.0}, {"takeover_s": -1.0}, {"start_s": float("nan")}, {"origin": {"x": "y"}}]
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PlannerError, match="Remedy"):
        PlanCosts(**wrong)  # type: ignore[arg-type]


def test_a_fleet_is_whole_racks() -> None:
    assert fleet_of(100_008).racks == 1389
    assert fleet_of(150).total_gpus == 144
    with pytest.raises(PlannerError, match="less than a rack"):
        fleet_of(71)
    with pytest.raises(PlannerError, match="no GPU"):
        fleet_of(72, trays=0)


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(PlannerError, match="nothing ever fails"):
        simulate(case(), 0)
    with pytest.raises(PlannerError, match="no time to simulate"):
        simulate(case(trays(8000, 0), days=0), 0)


# -- arithmetic of undisturbed training --------------------------------------------------------------------------------
def test_a_stretch_of_training_is_what_counting_step_by_step_gives() -> None:
    draw = stream(3, "stretches")
    for _ in range(200):
        pace = TrainingTimes(
            step_s=draw.choice((1.0, 2.5)),
            snapshot_every=draw.choice((0, 1, 3)),
            snapshot_s=draw.choice((0.0, 0.5)),
            copy_s=draw.choice((0.0, 4.0)),
            checkpoint_every=draw.choice((0, 4, 7)),
            checkpoint_s=draw.choice((0.0, 2.0)),
            write_s=draw.choice((0.0, 9.0)),
        )
        since, seconds = draw.randrange(20), draw.uniform(0, 60)
        now, steps, saved, kept = 0.0, 0, 0, 0
        seals: list[tuple[float, int]] = []
        writes: list[tuple[float, int]] = []
        while now + pace.step_s <= seconds:
            now += pace.step_s
            steps += 1
            at = since + steps
            if pace.snapshot_every and at % pace.snapshot_every == 0:
                now += pace.snapshot_s
                seals.append((0.0, at))
            if pace.checkpoint_every and at % pace.checkpoint_every == 0:
                now += pace.checkpoint_s
                writes.append((now + pace.write_s, at))
            if seals and seals[-1] == (0.0, at):
                seals[-1] = (now + pace.copy_s, at)
        saved = max((at for when, at in seals if when <= seconds), default=0)
        kept = max((at for when, at in writes if when <= seconds), default=0)
        found = progress(pace, since, seconds, 0, 0)
        assert (found.steps, found.snapshot, found.checkpoint) == (steps, saved, kept)
        assert found.steps * pace.step_s + found.saving_s + found.rest_s == pytest.approx(seconds)
