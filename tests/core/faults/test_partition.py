"""Groups that cannot be built though everybody lives: who is cut off is found, and nobody else is given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.faults.partition import PartitionReports
from rackrun.protocol.commands import BreakGeneration, Command, FenceWorker, GenerationPlan, StopJob
from rackrun.protocol.ids import Rank, TrayId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in

TRAYS = {Rank(0): TrayId("a"), Rank(1): TrayId("b"), Rank(2): TrayId("c")}


@pytest.fixture
def apart() -> CoreHarness:
    """Three trays with a slot each: ranks 0 and 1 on a and b, a spare on c. Their next generation is to be built, on a's exchange."""
    harness = CoreHarness(JobConfig(trays_min=3, trays_max=3, spares=1))
    for tray in "abc":
        harness.join(tray, 1)
    harness.train()
    harness.is_severed("a/0")
    assert plan_in(harness.park_all(passed=4)).store == "a:1"
    return harness


def again(harness: CoreHarness) -> GenerationPlan:
    """All park; the plan that follows."""
    return plan_in(harness.park_all(passed=4))


def fenced(commands: Sequence[Command]) -> list[str]:
    return [command.slot for command in every(FenceWorker, commands)]


def test_nobody_is_given_up_when_it_is_not_known_who_is_cut_off(apart: CoreHarness) -> None:
    assert not apart.is_unbuilt("b/0", cut_off=True)
    announced = apart.is_unbuilt("a/0")  # on the exchange's own tray: it proves nothing
    assert only(BreakGeneration, announced).because == "not everybody reached everybody"
    assert not fenced(announced)


def test_the_next_exchange_is_on_a_tray_without_a_rank(apart: CoreHarness) -> None:
    apart.is_unbuilt("b/0", cut_off=True)
    apart.is_unbuilt("a/0")
    assert again(apart).store == "c:1"


@pytest.mark.parametrize(("cut", "other"), [("a/0", "b/0"), ("b/0", "a/0")])
def test_who_does_not_reach_an_exchange_that_others_reach_is_replaced(apart: CoreHarness, cut: str, other: str) -> None:
    for slot in ("a/0", "b/0"):
        apart.is_unbuilt(slot, cut_off=slot == "b/0")
    again(apart)
    apart.is_unbuilt(cut, cut_off=True)
    announced = apart.is_unbuilt(other)
    assert fenced(announced) == [cut]
    assert "which others did" in only(FenceWorker, announced).because
    apart.timer("gather")
    plan = plan_in(apart.parks(other))
    assert {member.slot for member in plan.members} == {other, "c/0"}
    assert plan.store == "c:1", "it is known to be reached"


def test_who_has_told_is_not_taken_for_late(apart: CoreHarness) -> None:
    apart.is_unbuilt("a/0")
    assert fenced(apart.timer("resume")) == ["b/0"], "which has said nothing"


def test_a_network_that_never_heals_ends_the_job_with_all_reasons(apart: CoreHarness) -> None:
    for _ in range(20):
        for slot in ("a/0", "b/0"):
            answers = apart.is_unbuilt(slot)
        answers = apart.park_all(passed=4)
        if every(StopJob, answers):
            break
    assert "not everybody reached everybody" in only(StopJob, answers).because


def test_what_was_tried_is_forgotten_once_groups_are_built(apart: CoreHarness) -> None:
    apart.is_unbuilt("b/0", cut_off=True)
    apart.is_unbuilt("a/0")
    again(apart)
    apart.resume_all()
    apart.is_severed("a/0")
    assert again(apart).store == "c:1"
    apart.is_unbuilt("b/0", cut_off=True)
    apart.is_unbuilt("a/0", cut_off=True)
    assert again(apart).store == "a:1"


def test_an_older_generations_report_changes_nothing(apart: CoreHarness) -> None:
    apart.resume_all()
    assert not apart.is_unbuilt("b/0", cut_off=True)


# -- who is to blame
@pytest.mark.parametrize(
    ("told", "blamed"),
    [
        ({0: False, 1: True, 2: False}, (1,)),
        ({0: True, 1: False, 2: True}, (0, 2)),
        ({0: False, 1: True, 2: True}, ()),  # the exchange's own tray is the only one that reached it
        ({0: False, 1: False, 2: False}, ()),
        ({1: True, 2: True}, ()),
        ({1: True}, (1,)),  # rank 2 has built its groups
    ],
)
def test_a_witness_is_on_another_tray_than_the_exchange(told: dict[int, bool], blamed: tuple[int, ...]) -> None:
    rifts = PartitionReports()
    for rank, cut_off in told.items():
        rifts.add(Rank(rank), cut_off=cut_off)
    assert rifts.blame(TRAYS, "a:1", TrayId("a")) == blamed
    assert list(rifts.tried) == ([] if blamed else ["a:1"])


@pytest.fixture
def beginning() -> CoreHarness:
    """Two ranks that have entered their first setup, of a job that may start again once."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, max_restarts=1))
    for tray in "ab":
        harness.join(tray, 1)
    return harness


def test_a_world_whose_first_groups_cannot_be_built_begins_again(beginning: CoreHarness) -> None:
    said = beginning.is_unbuilt("a/0")
    assert sorted(fenced(said)) == ["a/0", "b/0"], "the other may wait for this one in NCCL"
    assert not beginning.is_unbuilt("b/0"), "it was told to end"


def test_a_world_whose_first_groups_never_can_be_ends_the_job_with_the_reason(beginning: CoreHarness) -> None:
    beginning.is_unbuilt("a/0")
    for slot in ("a/0", "b/0"):
        beginning.exits(slot, signal=9)
    stop = only(StopJob, beginning.is_unbuilt("b/0"))
    assert "rank 1 could not build its groups (no route)" in stop.because
    assert "restarted 1 of 1 times" in stop.because
