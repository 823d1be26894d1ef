"""Cores that are wrong in one point each: the fuzz finds every one of them within so many seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rackrun.chaos.plan import Par
from rackrun.chaos.sim.fuzz import play, reduce
from rackrun.core import verdict
from rackrun.core.commands import Command, FenceWorker, StopJob
from rackrun.core.control_plane import ControlPlane
from rackrun.core.events import Event, WorkerExited
from rackrun.core.ids import Position, Rank, SlotId
from rackrun.core.rack import RackMachine
from rackrun.core.sources import Sources
from rackrun.core.workers import WorkerRecord
from rackrun.core.world import World

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


def found_by(core: type[ControlPlane] = ControlPlane) -> int:
    """The first seed that finds it."""
    return next((seed for seed in range(SEEDS) if play(seed, core).violation), SEEDS)


@pytest.mark.parametrize("core", [DoesNotFence, GivesUpEarly])
def test_a_core_that_is_wrong_is_found(core: type[ControlPlane]) -> None:
    assert found_by(core) < SEEDS


def test_a_core_that_commits_a_step_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(
        reports: Mapping[Rank, verdict.Report], floor: Position, floor_gate: tuple[float, ...] = ()
    ) -> tuple[Position, tuple[float, ...]]:
        return min((report.passed for report in reports.values()), default=floor), floor_gate

    monkeypatch.setattr(verdict, "committed", least)
    assert found_by() < SEEDS


def test_a_core_that_gives_a_spare_to_two_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(
        _self: RackMachine, lost: Mapping[Rank, SlotId], spares: Sequence[WorkerRecord]
    ) -> dict[Rank, WorkerRecord]:
        return dict.fromkeys(sorted(lost), spares[0]) if spares else {}

    monkeypatch.setattr(RackMachine, "choose", same)
    assert found_by() < SEEDS


def test_a_core_that_counts_on_snapshots_of_lost_trays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "forget_tray", lambda _self, _tray: None)
    assert found_by() < SEEDS


def test_a_core_that_uses_one_generation_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(self: World) -> int:
        self.generation = max(self.generation, 1)  # type: ignore[type-var, assignment]
        return self.generation

    monkeypatch.setattr(World, "next_generation", same)
    assert found_by() < SEEDS


def test_what_is_found_is_reduced_to_few_faults() -> None:
    seed = found_by(DoesNotFence)
    reduced = reduce(seed, DoesNotFence)
    assert reduced is not None
    job, outcome = reduced
    assert outcome.violation
    assert outcome.last
    assert isinstance(job.plan.plan, Par)
    assert len(job.plan.plan.parts) <= 3
