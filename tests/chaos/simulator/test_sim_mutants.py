"""Cores and drivers that are wrong in one point each: the fuzz finds every one of them within so many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.preempt_tray import Preempt
from rackrun.chaos.faults.targets import Exactly
from rackrun.chaos.plan.definition import AtStep, Inject, Par, Plan
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob, Simulation
from rackrun.chaos.simulator.fuzzing.draw_job import draw_job
from rackrun.chaos.simulator.fuzzing.fuzz import play, reduce
from rackrun.coordinator.shell.driver import Driver
from rackrun.core.faults import divergence
from rackrun.core.faults.corruption import Corruption
from rackrun.core.generation import restore_plan
from rackrun.core.generation.facts import PlanImpossible
from rackrun.core.generation.restore_sources import RestoreSources
from rackrun.core.generation.world import Phase, World
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.members.quarantine import Quarantine
from rackrun.core.members.rack import RackMachine
from rackrun.core.members.workers import WorkerRecord
from rackrun.protocol.commands import Command, FenceWorker, StopJob
from rackrun.protocol.events import Event, ReplicasDiffer, SnapshotMirrored, WorkerExited
from rackrun.protocol.ids import Position, Rank, SlotId
from rackrun.protocol.job_config import JobConfig

SEEDS = 400


class DoesNotFence(ControlPlane):
    """Takes a worker that it wants to end for one that has ended."""

    def handle(self, event: Event) -> Sequence[Command]:
        out: list[Command] = []
        for command in super().handle(event):
            if isinstance(command, FenceWorker):
                gone = WorkerExited(
                    at_ms=event.at_ms, slot=command.slot, incarnation=command.incarnation, signal=9, exit_code=None
                )
                out += self.handle(gone)
            else:
                out.append(command)
        return out


class GivesUpEarly(ControlPlane):
    """A loss while others recover is too much for it."""

    def handle(self, event: Event) -> Sequence[Command]:
        phase = self.view().phase
        out = super().handle(event)
        if isinstance(event, WorkerExited) and event.signal and phase == "training":
            return [StopJob(exit_code=3, because="somebody is lost", remedy="none")]
        return out


class ForgetsTheCondemned(ControlPlane):
    """What a worker says that is to end is not heard."""

    def handle(self, event: Event) -> Sequence[Command]:
        if isinstance(event, SnapshotMirrored):
            record = self._rack.current(event)
            if record is not None and not record.alive:
                return []
        return super().handle(event)


def found_by(core: type[ControlPlane] = ControlPlane, among: Iterable[int] = range(SEEDS)) -> int:
    """The first seed that finds it."""
    return next((seed for seed in among if play(seed, core).violation), SEEDS)


def violation_of(seed: int) -> str:
    return play(seed).violation


@pytest.mark.parametrize("core", [DoesNotFence, GivesUpEarly])
def test_a_core_that_is_wrong_is_found(core: type[ControlPlane]) -> None:
    assert found_by(core) < SEEDS


@pytest.mark.stories
def test_a_core_that_commits_a_step_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(
        reports: Mapping[Rank, restore_plan.ParkReport], floor: Position, floor_gate: tuple[float, ...] = ()
    ) -> tuple[Position, tuple[float, ...]]:
        return min((report.passed for report in reports.values()), default=floor), floor_gate

    monkeypatch.setattr(restore_plan, "committed", least)
    assert found_by() < SEEDS


def test_a_core_that_gives_a_spare_to_two_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(
        _self: RackMachine, lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord]
    ) -> dict[Rank, WorkerRecord]:
        return dict.fromkeys(sorted(lost), spares[0]) if spares else {}

    monkeypatch.setattr(RackMachine, "choose", same)
    assert found_by() < SEEDS


@pytest.mark.stories
def test_a_core_that_counts_on_snapshots_of_lost_trays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestoreSources, "forget_tray", lambda _self, _tray: None)
    assert found_by() < SEEDS


def test_a_core_that_uses_one_generation_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(self: World) -> int:
        self.generation = max(self.generation, 1)  # type: ignore[assignment]
        return self.generation

    monkeypatch.setattr(World, "next_generation", same)
    assert found_by() < SEEDS


# -- how far a rollback goes
@pytest.mark.stories
def test_a_core_that_goes_back_further_than_it_must_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    newest_first = restore_plan._candidates
    monkeypatch.setattr(restore_plan, "_candidates", lambda *given: newest_first(*given)[::-1])
    seed = found_by()
    assert "everybody could have had step" in violation_of(seed)


def test_a_core_that_does_not_hear_of_copies_of_who_is_condemned_is_found() -> None:
    """The tray of the only rank is told to leave, and is gone before another has read its last snapshot there."""
    config = JobConfig(trays_min=4, trays_max=4, spares=3, repair_patience_ms=20_000, policy_function="policy:choose")
    preempted = Inject(
        fault=Preempt(notice_s=2.4),
        target=Exactly(Subjects.TRAY, ("tray-0",)),
        when=AtStep(step=8, plus_s=0.5),
    )
    found = {
        core: [
            Simulation(
                SimulatedJob(
                    seed=seed,
                    config=config,
                    trays=4,
                    slots=1,
                    units=20,
                    plan=Plan(plan=preempted, seed=seed),
                    shards="unique",
                    snapshot_every=3,
                ),
                core,
            )
            .run()
            .violation
            for seed in range(50)
        ]
        for core in (ControlPlane, ForgetsTheCondemned)
    }
    assert not any(found[ControlPlane])
    assert any("everybody could have had step" in what for what in found[ForgetsTheCondemned])


# -- state that is not to be trusted
COMPARED = [seed for seed in range(SEEDS) if draw_job(seed).check_replicas]


def test_a_core_that_trusts_what_was_found_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = restore_plan.state_plan

    def trusting(**given: Any) -> restore_plan.StatePlan | None:
        return plan(**{**given, "trusted": None})

    monkeypatch.setattr(restore_plan, "state_plan", trusting)
    assert "a state that was found wrong" in violation_of(found_by(among=COMPARED))


def test_a_core_that_computes_on_from_memory_that_may_be_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the good step, where nobody can say who is wrong."""
    monkeypatch.setattr(World, "unsure", property(lambda _: False, lambda _, __: None))
    assert "a state that was found wrong" in violation_of(1875)


def test_a_core_that_keeps_the_state_of_who_is_to_blame_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(self: Corruption, event: ReplicasDiffer) -> None:
        if event.generation == self._heard or self.world.phase is not Phase.TRAINING:
            return
        self._heard, self.world.trusted = event.generation, event.good
        self.facts.add(PlanImpossible("replicas differ"))

    monkeypatch.setattr(Corruption, "replicas_differ", keeps)
    assert "a state that was found wrong" in violation_of(found_by(among=COMPARED))


def test_who_blames_most_of_the_replicas_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewest(votes: Sequence[tuple[Rank, int]]) -> int | None:
        return Counter(digest for _, digest in votes).most_common()[-1][0]

    monkeypatch.setattr(divergence, "_right", fewest)
    assert "its GPU has never been wrong" in violation_of(found_by(among=COMPARED))


# -- the driver, which carries out what the core decides
def test_a_driver_that_tells_of_a_generation_before_it_is_on_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_persist", lambda *_: True)
    assert "was told before it was on disk" in violation_of(found_by())


def test_a_driver_that_drops_a_command_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_send", lambda *_: None)
    assert found_by() < SEEDS


def test_a_driver_that_forgets_its_timers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_set_timer", lambda *_: None)
    assert found_by() < SEEDS


# -- long jobs
LONG = [seed for seed in range(SEEDS) if draw_job(seed).units >= 1_000]


@pytest.mark.parametrize("name", ["lift", pytest.param("trains", marks=pytest.mark.stories)])
def test_a_core_that_leaves_slots_out_for_good_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ever; or for longer and longer, however long they have been in order."""
    monkeypatch.setattr(Quarantine, name, lambda *_: False)
    assert "had to survive" in violation_of(found_by(among=LONG))


def test_what_is_found_is_reduced_to_few_faults() -> None:
    seed = found_by(DoesNotFence)
    reduced = reduce(seed, DoesNotFence)
    assert reduced is not None
    job, outcome = reduced
    assert outcome.violation
    assert outcome.last
    assert isinstance(job.plan.plan, Par)
    assert len(job.plan.plan.parts) <= 3
