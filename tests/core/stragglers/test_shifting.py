"""A slow rank gets fewer micro-batches, and as many as the others when it is slow no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import BreakGeneration, Command, DealShards, FenceWorker, Notice, PauseWorkers
from rackrun.protocol.events import SlowRanksChanged
from rackrun.protocol.ids import Generation
from rackrun.protocol.job_config import JobConfig, SlowRanks
from tests.core.core_harness import CoreHarness, every, only, plan_in, slow_rank

SHARDS = 36


def trained(answer: SlowRanks = "shift", *, spares: int = 2, mesh: dict[str, int] | None = None) -> CoreHarness:
    """Trays of two slots, ranks 0 to 5 on a, b, c; d has the spares."""
    trays = "abcd" if spares else "abc"
    harness = CoreHarness(
        JobConfig(
            trays_min=len(trays),
            trays_max=len(trays),
            spares=spares,
            slow_ranks=answer,
            min_ranks=1,
            rules=parse_rules("swap,shrink"),
        )
    )
    harness.shards = SHARDS
    for tray in trays:
        harness.join(tray, 2)
    harness.resizes = "in place"
    for slot in harness.members:
        harness.ready(slot, "all", mesh)
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    assert harness.view.phase == "training"
    return harness


@pytest.fixture
def job() -> CoreHarness:
    return trained()


def shares(answers: Sequence[Command]) -> tuple[int, ...]:
    return only(DealShards, answers).shares


def texts(answers: Sequence[Command]) -> list[str]:
    return [notice.text for notice in every(Notice, answers)]


def test_a_slow_rank_gets_fewer_and_nobody_pauses(job: CoreHarness) -> None:
    answers = job.are_slow(2, times=3.0)
    deal = only(DealShards, answers)
    assert deal.shares == (7, 7, 2, 7, 7, 6)
    assert (deal.generation, deal.number, len(deal.workers)) == (job.view.generation, 1, 6)
    assert not every(PauseWorkers, answers)
    assert texts(answers)[-1] == "rank 2 is slow, with 2 of 36 micro-batches from now on, others with up to 7"


def test_all_get_as_many_again_when_nobody_is_slow(job: CoreHarness) -> None:
    job.are_slow(2, times=3.0)
    answers = job.are_slow()
    deal = only(DealShards, answers)
    assert (deal.shares, deal.number) == ((), 2)
    assert texts(answers)[-1] == "all ranks get as many micro-batches again"


def test_the_same_said_again_changes_nothing(job: CoreHarness) -> None:
    job.are_slow(2, times=3.0)
    assert not every(DealShards, job.are_slow(2, times=3.05))


def test_one_that_becomes_slower_still_gets_fewer_still(job: CoreHarness) -> None:
    assert shares(job.are_slow(2, times=1.5))[2] == 4
    assert shares(job.are_slow(2, times=6.0))[2] == 1


def test_a_rank_that_shares_its_samples_with_a_slow_one_has_its_share() -> None:
    job = trained(mesh={"dp": 3, "tp": 2})
    assert shares(job.are_slow(3, times=2.0)) == (15, 7, 14)


def test_where_ranks_meet_in_every_micro_batch_it_is_only_said(job: CoreHarness) -> None:
    answers = job.are_slow(2, times=3.0, meets=True)
    assert not every(DealShards, answers)
    assert "meet in collectives of every micro-batch" in texts(answers)[-1]
    assert not texts(job.are_slow(2, times=3.0, meets=True)), "once"


def test_a_script_that_does_not_say_how_many_there_are_is_left_alone() -> None:
    harness = CoreHarness(JobConfig(trays_min=1, trays_max=1, spares=0, slow_ranks="shift"))
    harness.join("a", 4)
    harness.train()
    answers = harness.are_slow(2, times=3.0)
    assert not every(DealShards, answers)
    assert "follows the world, or has not been told" in texts(answers)[-1]


@pytest.mark.parametrize("answer", ["notice", "swap", "off"])
def test_who_has_not_asked_for_it_keeps_equal_shares(answer: SlowRanks) -> None:
    assert not every(DealShards, trained(answer).are_slow(2, times=3.0))


# -- generations -----------------------------------------------------------------------------------------------------
def test_the_next_generation_begins_with_the_shares_of_those_who_are_still_there(job: CoreHarness) -> None:
    dealt = shares(job.are_slow(2, times=3.0))
    job.exits("c/1")
    plan = plan_in(job.park_all())
    assert plan.shares == dealt
    job.resume_all()
    deal = only(DealShards, job.are_slow())
    assert (deal.shares, deal.number, deal.generation) == ((), 1, plan.generation)


def test_whoever_takes_a_slow_ranks_place_is_not_slow(job: CoreHarness) -> None:
    job.are_slow(2, times=3.0)
    job.exits("b/0")
    assert plan_in(job.park_all()).shares == ()
    assert not every(DealShards, job.resume_all())


def test_a_slow_rank_beside_one_that_is_replaced_stays_slow(job: CoreHarness) -> None:
    job.are_slow(2, 3, times=3.0)
    job.exits("b/0")
    assert plan_in(job.park_all()).shares == (7, 7, 7, 2, 7, 6)


def test_a_world_of_another_size_begins_with_equal_shares() -> None:
    job = trained(spares=0)
    job.are_slow(2, times=3.0)
    job.exits("c/1")
    plan = plan_in(job.park_all())
    assert (plan.world_size, plan.shares) == (5, ())


def test_what_is_said_while_a_generation_breaks_is_dealt_in_no_generation(job: CoreHarness) -> None:
    job.exits("c/1")
    assert not every(DealShards, job.are_slow(2, times=3.0))


def test_what_is_said_of_another_generation_is_ignored(job: CoreHarness) -> None:
    job.exits("c/1")
    job.park_all()
    job.resume_all()
    assert not job.tell(SlowRanksChanged(generation=Generation(1), slow=(slow_rank(2, "b/0", 3.0),)))


# -- with a swap -----------------------------------------------------------------------------------------------------
def test_with_a_better_spare_it_is_replaced_and_nothing_is_shifted() -> None:
    job = trained("swap,shift")
    answers = job.are_slow(2, times=3.0)
    assert every(PauseWorkers, answers)
    assert not every(DealShards, answers)
    job.pause_all()
    assert plan_in(job.park_all()).shares == ()


def test_without_a_spare_it_gets_fewer_until_one_is_ready() -> None:
    job = trained("swap,shift")
    for slot in ("d/0", "d/1"):
        job.checks(slot, "its driver does not answer")
    assert shares(job.are_slow(2, times=3.0))[2] == 2
    assert every(PauseWorkers, job.checks("d/0"))
    assert [command.slot for command in every(FenceWorker, job.pause_all())] == ["b/0"]
    assert plan_in(job.park_all()).shares == ()


def test_a_second_slow_rank_gets_fewer_from_the_first_ones_swap_on() -> None:
    job = trained("swap,shift", spares=2)
    job.checks("d/1", "its driver does not answer")
    job.are_slow(2, 4, times=3.0)
    job.pause_all()
    assert plan_in(job.park_all()).shares == (7, 7, 7, 7, 2, 6)


def test_a_swap_that_is_called_off_shifts() -> None:
    job = trained("swap,shift")
    job.are_slow(2, times=3.0)
    for slot in ("d/0", "d/1"):
        job.checks(slot, "its driver does not answer")
    only(BreakGeneration, job.pause_all())
    assert plan_in(job.park_all()).shares[2] == 2
