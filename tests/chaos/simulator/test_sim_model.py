"""The model under the fuzz: a plan of one's own, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.faults.data.flip_bit import FlipBit
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.freeze_tray import FreezeTray
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hangs.slow_down import Slow
from rackrun.chaos.faults.network.bad_link import Link
from rackrun.chaos.faults.network.network_partition import Partition
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.processes.preempt_tray import Preempt
from rackrun.chaos.faults.processes.raise_exception import Raise
from rackrun.chaos.faults.processes.return_tray import Return
from rackrun.chaos.faults.storage.disk_failure import DiskFails
from rackrun.chaos.faults.storage.disk_full import DiskFull
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import Exactly, One, Target
from rackrun.chaos.faults.virtual_strike import CallFault
from rackrun.chaos.plan.definition import AtStep, Inject, Par, Part, Plan, Seq
from rackrun.chaos.simulator.base.coverage_marks import Buggify
from rackrun.chaos.simulator.base.durations import SimCosts
from rackrun.chaos.simulator.base.ground_truth import GroundTruth, Violation
from rackrun.chaos.simulator.base.virtual_loop import VirtualLoop
from rackrun.chaos.simulator.base.virtual_time import FIRST, LAST, Engine
from rackrun.chaos.simulator.cluster.agent_model import Agent
from rackrun.chaos.simulator.cluster.checkpoint_storage import _Files
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob, Simulation, SimulationOutcome
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import Command
from rackrun.protocol.events import Event, WorkerReady
from rackrun.protocol.ids import TrayId
from rackrun.protocol.job_config import JobConfig

RANK, TRAY, AGENT = Subjects.RANK, Subjects.TRAY, Subjects.AGENT


def job(
    part: Part, *, spares: int = 1, trays: int = 2, shards: str = "replicas", units: int = 30, checkpoint_every: int = 0
) -> SimulatedJob:
    config = JobConfig(trays_min=trays, trays_max=trays, spares=spares, start_over=bool(checkpoint_every))
    plan = Plan(plan=part, seed=1)
    return SimulatedJob(
        seed=1,
        config=config,
        trays=trays,
        slots=2,
        units=units,
        plan=plan,
        shards=shards,
        checkpoint_every=checkpoint_every,
    )


def at(step: int, fault: Fault, target: Target, plus_s: float = 0.5) -> Inject:
    return Inject(fault=fault, target=target, when=AtStep(step=step, plus_s=plus_s))


def run(part: Part, *, spares: int = 1, trays: int = 2, shards: str = "replicas", units: int = 30) -> SimulationOutcome:
    outcome = Simulation(job(part, spares=spares, trays=trays, shards=shards, units=units)).run()
    assert not outcome.violation
    assert outcome.stopped is not None
    return outcome


def test_a_killed_rank_is_replaced_in_the_time_that_it_takes() -> None:
    costs = SimCosts()
    calm, struck = run(at(99, Kill(), One(RANK))), run(at(3, Kill(), One(RANK)))
    assert struck.stopped is not None
    assert struck.stopped.exit_code == 0
    assert struck.marks["a replica was the source"] >= 1
    lost_s = struck.virtual_s - calm.virtual_s
    assert 0 < lost_s < (costs.start_s + 2 * costs.step_s) * (1 + costs.spread)


def test_a_tray_that_is_paused_beyond_its_lease_is_given_up_and_refused_when_it_wakes() -> None:
    outcome = run(at(3, Pause(for_s=40.0), Exactly(TRAY, ("tray-1",))), spares=2, units=60)
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a lease lapsed"] == 1
    assert outcome.marks["a zombie was refused"] == 1


def test_a_tray_that_is_frozen_for_less_than_its_lease_loses_nobody_and_says_so() -> None:
    simulated = Simulation(job(at(3, FreezeTray(for_s=4.0), Exactly(TRAY, ("tray-1",))), spares=2, units=60))
    outcome = simulated.run()
    assert not outcome.violation
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert "a lease lapsed" not in outcome.marks
    assert "a rank was fenced" not in outcome.marks
    what = "the agent of tray-1 did not answer for 4.0 s, and does again. The workers there stood still with it"
    assert [text for text in simulated.coordinator.notices if text.startswith(what)]


def test_an_agent_that_is_paused_without_its_workers_is_told_apart_from_its_tray() -> None:
    simulated = Simulation(job(at(3, Pause(for_s=4.0), Exactly(AGENT, ("tray-1",))), spares=2, units=60))
    assert not simulated.run().violation
    told = [text for text in simulated.coordinator.notices if text.startswith("the agent of tray-1 did not answer")]
    assert ["The workers there went on" in text for text in told] == [True]


def test_a_tray_that_stands_still_in_a_recovery_keeps_its_ranks_if_nobody_could_replace_them_at_once() -> None:
    frozen = at(3, FreezeTray(for_s=6.0), Exactly(TRAY, ("tray-1",)), plus_s=0.5)
    killed = at(3, Kill(), Exactly(RANK, ("0",)), plus_s=0.6)
    simulated = Simulation(job(Par(parts=(frozen, killed)), spares=1, trays=3, units=60))
    outcome = simulated.run()
    assert not outcome.violation
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert "a rank was fenced" not in outcome.marks
    assert [text for text in simulated.coordinator.notices if text.startswith("nothing has come from tray-1 since")]


def test_a_tray_that_is_frozen_beyond_its_lease_is_given_up_and_refused_when_it_wakes() -> None:
    outcome = run(at(3, FreezeTray(for_s=40.0), Exactly(TRAY, ("tray-1",))), spares=2, units=60)
    assert outcome.marks["a lease lapsed"] == outcome.marks["a zombie was refused"] == 1


def test_a_partition_shorter_than_the_lease_loses_nobody() -> None:
    outcome = run(at(3, Partition(shape="from_coordinator", for_s=3.0), Exactly(TRAY, ("tray-1",))))
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert "a lease lapsed" not in outcome.marks
    assert "a replica was the source" not in outcome.marks


AGENT_1 = Exactly(Subjects.AGENT, ("tray-1",))
GONE = ("a lease lapsed", "a zombie was refused", "a replica was the source")


def test_a_link_that_is_reset_is_resumed_and_costs_nobody() -> None:
    outcome = run(at(3, Link(reset=True, for_s=3.0), AGENT_1))
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a link was resumed"] >= 1
    assert not [mark for mark in GONE if mark in outcome.marks]


def test_a_link_that_is_reset_for_longer_than_the_lease_loses_the_tray_and_its_agent_is_refused() -> None:
    outcome = run(at(3, Link(reset=True, for_s=20.0), AGENT_1), spares=2, units=60)
    assert outcome.marks["a lease lapsed"] == outcome.marks["a zombie was refused"] == 1
    assert "a link was resumed" not in outcome.marks


def test_an_agent_that_cannot_know_that_its_link_is_gone_is_lost_with_its_lease() -> None:
    outcome = run(at(3, Link(half_open=True, for_s=80.0), AGENT_1), spares=2, units=120)
    assert outcome.marks["a lease lapsed"] == outcome.marks["a zombie was refused"] == 1


def alive_at(part: Part, *times_s: float) -> list[bool]:
    """Whether the first agent of tray-1 is alive at these times. The fault strikes in the first 20 s."""
    sim, found = Simulation(replace(job(part, spares=2, units=200), faults_s=400.0)), []

    def look() -> None:
        found.append(agents[0].alive)

    agents: list[Agent] = []
    sim.engine.after(1.0, lambda: agents.append(sim.agents[TrayId("tray-1")]))
    for at_s in times_s:
        sim.engine.after(at_s, look)
    assert not sim.run().violation
    return found


def test_an_agent_that_hears_nothing_holds_on_for_a_lease_and_half_a_minute_and_then_half_a_minute_more() -> None:
    cut = at(3, Partition(shape="from_coordinator"), Exactly(TRAY, ("tray-1",)))
    assert alive_at(cut, 20.0, 90.0, 130.0) == [True, True, False]


def test_an_agent_that_is_told_to_leave_does_not_wait_until_it_is_killed() -> None:
    assert alive_at(at(3, Preempt(notice_s=600.0), Exactly(TRAY, ("tray-1",))), 10.0, 35.0) == [True, False]


def test_a_process_that_outlives_its_exit_is_killed_when_its_place_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buggify, "__call__", lambda _self, site: site == "agent: a process is reaped late")
    outcome = run(at(3, Raise(), One(RANK)), spares=0)
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a process outlived its exit and was killed"] == 1


def test_a_shard_whose_tray_is_lost_comes_from_the_copy_on_another() -> None:
    outcome = run(at(6, Kill(), Exactly(TRAY, ("tray-0",))), spares=2, trays=3, shards="unique")
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a copy on another tray was restored"] >= 1


def test_a_worker_crashes_at_the_point_that_is_named() -> None:
    point = CrashAt(point="worker: parking", nth=1)
    outcome = run(Seq(parts=(at(2, point, Exactly(RANK, ("0",))), at(3, Kill(), Exactly(RANK, ("1",))))), spares=2)
    assert outcome.marks["a worker crashed at a point"] == 1
    assert outcome.marks["a loss came while others parked"] >= 1


# -- the disk
ALL_TRAYS = Seq(parts=tuple(at(14, Kill(), Exactly(TRAY, (tray,)), 0.0) for tray in ("tray-0", "tray-1")))
BACK = Seq(parts=tuple(Inject(fault=Return(), target=Exactly(TRAY, (tray,))) for tray in ("tray-0", "tray-1")))
LOST = (ALL_TRAYS, BACK)
"""With the last copy of everything."""
DISK = One(Subjects.STORAGE)


def on_disk(*parts: Part) -> SimulationOutcome:
    """A checkpoint after steps 4, 9, 14, ...: that of step 14 is not whole when all is lost."""
    config = JobConfig(trays_min=2, trays_max=2, spares=0, start_over=True, repair_patience_ms=60_000)
    told = replace(job(Seq(parts=parts), checkpoint_every=5, shards="unique"), config=config)
    outcome = Simulation(told).run()
    assert not outcome.violation
    assert outcome.stopped is not None
    return outcome


def test_a_world_that_has_lost_all_begins_from_the_newest_checkpoint_that_is_whole() -> None:
    outcome = on_disk(*LOST)
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a world began from a checkpoint"] == 1
    again = on_disk(at(2, DiskFull(), DISK), *LOST)
    assert "a world began from a checkpoint" not in again.marks
    assert again.marks["a checkpoint was given up"] >= 4
    assert again.virtual_s - outcome.virtual_s > 8  # ten steps more are done again


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one() -> None:
    outcome = on_disk(at(12, FlipBit(of="checkpoint"), DISK), *LOST)
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    assert outcome.marks["a damaged checkpoint was passed over"] == 1
    assert outcome.marks["a world began from a checkpoint"] == 1


def test_a_job_whose_checkpoints_cannot_be_read_stops_instead_of_beginning_anew() -> None:
    outcome = on_disk(at(12, DiskFails(call="read"), DISK), *LOST)
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code != 0
    assert "StateLost" in outcome.stopped.because


def test_a_disk_that_is_full_is_neither_slow_nor_torn() -> None:
    disk, slow, full = (
        Simulation(job(Seq(parts=()), checkpoint_every=5)).disk,
        CallFault("write", "slow"),
        CallFault("write", "ENOSPC"),
    )
    for number, fault in enumerate((CallFault("write", "torn"), slow)):
        disk.strike(fault, number)
    assert disk._failing("write") == slow
    heal = disk.strike(full, 9)
    assert disk._failing("write") == full
    heal()
    assert disk._failing("write") == slow


def test_a_checkpoint_that_is_due_while_an_older_one_is_written_is_passed_over() -> None:
    usual, slow = (
        on_disk(at(2, DiskFails(call="fsync", error="slow", slow_s=seconds), DISK), *LOST) for seconds in (0.1, 6.5)
    )
    assert usual.virtual_s + 4 < slow.virtual_s  # from step 9, and from step 4


def test_parts_of_two_trainings_make_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reduction that is not exact, what fewer ranks have computed is another training."""
    simulation = Simulation(replace(job(Seq(parts=()), checkpoint_every=5), exact=False))
    began = simulation.truth.began
    both = _Files({0: began.then(1, 3), 1: began.then(1, 2)})
    monkeypatch.setattr(simulation.disk, "_whole", {0: both})
    with pytest.raises(Violation, match="two trainings"):
        simulation.disk.begins(1)


class _Listening(ControlPlane):
    """A core that keeps what it is told."""

    told: ClassVar[list[Event]] = []

    def handle(self, event: Event) -> Sequence[Command]:
        self.told.append(event)
        return super().handle(event)


def told_in(simulated: SimulatedJob) -> list[Event]:
    """What the core of a job is told."""
    _Listening.told.clear()
    outcome = Simulation(simulated, _Listening).run()
    assert not outcome.violation
    return [*_Listening.told]


def test_after_all_have_entered_main_again_a_rank_knows_its_replicas_from_the_second_unit_on() -> None:
    whole = job(at(5, Kill(), Exactly(RANK, ("0",))), spares=0, trays=3, shards="pairs")
    config = msgspec.structs.replace(whole.config, min_ranks=1, rules=parse_rules("shrink"))
    told = told_in(replace(whole, config=config, reenters=True))
    said = [event.replica_class for event in told if isinstance(event, WorkerReady) and event.slot == "tray-2/0"]
    assert said[:3] == ["class 0", "start class 1", "class 1"], "it has another rank now"


def test_a_slow_rank_makes_all_slow() -> None:
    calm, slow = run(at(99, Kill(), One(RANK))), run(at(3, Slow(share=0.5, for_s=10.0), One(RANK)))
    assert slow.virtual_s > calm.virtual_s + 3


@pytest.mark.parametrize(
    ("fault", "target", "what"),
    [
        (DiskFull(), One(Subjects.STORAGE), "disk_full"),
        (Kill(), One(Subjects.COORDINATOR), "kill"),
        (CrashAt(point="nowhere"), One(RANK), "nowhere"),
    ],
)
def test_a_fault_that_has_no_model_is_refused_by_name(fault: Fault, target: Target, what: str) -> None:
    with pytest.raises(Unsupported, match=what) as refused:
        Simulation(job(at(1, fault, target)))
    assert refused.value.remedy


def test_what_happens_at_the_same_time_happens_by_priority_and_then_in_order() -> None:
    engine = Engine()
    seen: list[str] = []
    engine.at(5, seen.append, "second")
    engine.at(5, seen.append, "last", priority=LAST)
    engine.at(5, seen.append, "third")
    engine.at(5, seen.append, "first", priority=FIRST)
    while engine.step():
        pass
    assert seen == ["first", "second", "third", "last"]
    assert engine.now_ns == 5


def test_two_histories_in_one_generation_are_seen() -> None:
    truth = GroundTruth(3)
    truth.state(2, truth.began.then(1, 4))
    truth.state(2, truth.began.then(1, 4))
    with pytest.raises(Violation, match="two histories"):
        truth.state(2, truth.began.then(2, 4))


def test_a_unit_that_a_rank_is_missing_from_is_seen() -> None:
    with pytest.raises(Violation, match="samples lost or doubled"):
        GroundTruth(3).gate_full(1, 0, [0, 2, 2], 3, heard=True)


def test_a_stopped_process_calls_what_came_due_and_what_arrived_in_that_order_when_it_goes_on() -> None:
    engine, called = Engine(), list[str]()
    loop = VirtualLoop(engine, late_s=lambda: 0.0)
    loop.call_later(1.0, lambda: called.append("a timer")).cancel()
    loop.call_later(2.0, lambda: called.append("another timer"))
    engine.after(0.5, loop.stop)
    engine.after(1.5, loop.call, called.append, "a message")
    engine.after(3.0, loop.go_on)
    while engine.step():
        assert loop.time() >= 3.0 or not called
    assert called == ["a message", "another timer"]
    assert not loop.stopped


# -- a wrong bit that no comparison can find
def run_with_hidden_bit(
    later: Inject, *, ranks: int, every: int, others: tuple[str, ...], shards: str = "replicas"
) -> SimulationOutcome:
    """Run a job in which rank 1 is the only one of its replicas that is left after step 8, and flips before others take
    its state. Later one more rank flips."""
    hidden = at(8, FlipBit(of="parameters"), Exactly(RANK, ("1",)), plus_s=0.1)
    killed = at(8, Kill(), Exactly(RANK, others), plus_s=0.11)
    trays = ranks + len(others)
    drawn = job(Par(parts=(hidden, killed, later)), spares=len(others), trays=trays, shards=shards)
    outcome = Simulation(replace(drawn, slots=1, check_replicas=every)).run()
    assert not outcome.violation
    assert outcome.stopped is not None
    assert outcome.stopped.exit_code == 0
    return outcome


@pytest.mark.parametrize(("step", "plus_s"), [(10, 0.5), (8, 1.0)])  # after the next comparison, and before
@pytest.mark.parametrize(("shards", "ranks", "others"), [("replicas", 3, ("0", "2")), ("pairs", 6, ("3", "5"))])
def test_a_wrong_bit_that_all_replicas_have_is_not_found_when_another_is_outvoted(
    shards: str, ranks: int, others: tuple[str, ...], step: int, plus_s: float
) -> None:
    later = at(step, FlipBit(of="parameters"), Exactly(RANK, ("2",)), plus_s)
    outcome = run_with_hidden_bit(later, ranks=ranks, every=1, others=others, shards=shards)
    assert outcome.marks["a corrupt rank was outvoted"] == 1


def test_a_wrong_bit_that_both_replicas_have_is_not_found_when_they_compute_again() -> None:
    """They compare in steps 10 and 15. When they have gone back, steps 10 and 11 say nothing yet, and step 15 does."""
    later = at(12, FlipBit(of="parameters"), Exactly(RANK, ("0",)))
    outcome = run_with_hidden_bit(later, ranks=2, every=5, others=("0",))
    assert outcome.marks["a corrupt rank was found by computing again"] == 1
