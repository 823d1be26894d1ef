"""What is done about a slow rank: it is told; if asked for, one at a time is replaced between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from rackrun.core.faults.standstills import STANDSTILLS_MAX
from rackrun.core.stragglers.straggler_response import SWAPS_MAX, WITHIN_MS
from rackrun.protocol.commands import Answer, BreakGeneration, Command, Notice, PauseWorkers
from rackrun.protocol.events import BreakerClosed, ReturnRequested, ShrinkRequested, SlowRanksChanged
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Generation, Position
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, condemned, every, only, only_condemned, plan_in, slow_rank


def trained(
    slow_ranks: Literal["notice", "swap", "off"],
    *,
    clique: str = "x",
    trays: str = "abcde",
    spares: int = 4,
    min_ranks: int = 0,
) -> CoreHarness:
    """Trays of two slots, the last of them spares; without ``clique`` nobody tells of GPUs."""
    config = JobConfig(
        trays_min=len(trays), trays_max=len(trays), spares=spares, slow_ranks=slow_ranks, min_ranks=min_ranks
    )
    harness = CoreHarness(config)
    harness.resizes = "in place" if min_ranks else ""
    for tray in trays:
        harness.join(tray, 2, clique=clique)
    harness.train()
    return harness


@pytest.fixture(params=["in a clique", "without a topology"])
def job(request: pytest.FixtureRequest) -> CoreHarness:
    """Ranks 0 to 5 on a, b, c; d and e wait."""
    return trained("swap", clique="x" if request.param == "in a clique" else "")


def swapped(harness: CoreHarness, answers: Sequence[Command]) -> dict[int, str]:
    """The planned swap that ``answers`` begin is made: rank -> its new slot."""
    only(PauseWorkers, answers)
    before = {rank.rank: rank.slot for rank in harness.view.ranks}
    fenced = [command.slot for command in condemned(harness.pause_all())]
    assert len(fenced) == 1, "one at a time"
    plan = plan_in(harness.park_all(passed=7))
    assert (plan.committed, plan.rollback) == (Position(7), None)
    harness.exits(fenced[0])
    harness.resume_all()
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    return {member.rank: member.slot for member in plan.members if before[member.rank] != member.slot}


def texts(answers: Sequence[Command]) -> list[str]:
    return [notice.text for notice in every(Notice, answers)]


# -- notice ----------------------------------------------------------------------------------------------------------
def test_by_default_it_is_told_how_slow_and_nothing_is_done() -> None:
    harness = trained("notice")
    (notice,) = harness.are_slow(3)
    assert isinstance(notice, Notice)
    assert notice.text == (
        "rank 3 on b/1 is slow: 1.5 times its peers' own time, 1.5 times its own best, in 15 of the last 20 measurements"
    )


def test_it_is_told_once_and_when_it_is_over() -> None:
    harness = trained("notice")
    harness.are_slow(3)
    (text,) = texts(harness.are_slow(3, 4))
    assert text.startswith("rank 4 on c/0 is slow: 1.5 times")
    assert texts(harness.are_slow(4)) == ["rank 3 on b/1 is slow no more"]


def test_a_tray_all_of_whose_ranks_are_slow_is_named() -> None:
    harness = trained("notice")
    assert not any("as a whole" in text for text in texts(harness.are_slow(2)))
    assert texts(harness.are_slow(2, 3))[-1] == "b is slow as a whole (ranks 2, 3): look at the tray, not at its GPUs"


def test_when_all_are_slower_than_before_nobody_is_blamed() -> None:
    harness = trained("swap")
    (notice,) = harness.are_slow(everybody=1.8)
    assert isinstance(notice, Notice)
    assert notice.text == "all ranks take 1.8 times as long as they once did, each on its own: nobody is to blame"
    assert texts(harness.are_slow()) == ["the ranks are about as fast again as they once were"]


def test_off_is_off() -> None:
    assert not trained("off").are_slow(3)


def test_what_is_said_of_another_generation_is_ignored() -> None:
    harness = trained("swap")
    assert not harness.tell(SlowRanksChanged(generation=Generation(7), slow=(slow_rank(3, "b/1"),)))


# -- swap ------------------------------------------------------------------------------------------------------------
def test_a_slow_rank_is_replaced_between_two_steps(job: CoreHarness) -> None:
    answers = job.are_slow(3)
    assert not condemned(answers)
    assert any("a planned swap" in text and "rank 3: slow: 1.5 times" in text for text in texts(answers))
    assert list(swapped(job, answers)) == [3]


def test_the_slot_it_left_is_the_last_choice_from_then_on(job: CoreHarness) -> None:
    swapped(job, job.are_slow(3))
    assert "b/1" in [spare.slot for spare in job.view.spares]
    assert any("slow: 1.5 times" in why for tray in job.view.trays for why in tray.against.values())
    job.exits("b/0")  # its own tray's spare would be the first choice
    assert plan_in(job.park_all(passed=9)).members[2].slot != "b/1"


def test_with_nothing_better_left_it_is_a_choice(job: CoreHarness) -> None:
    swapped(job, job.are_slow(3))
    for slot in [spare.slot for spare in job.view.spares if spare.slot != "b/1"]:
        job.checks(slot, "its driver does not answer")
    job.exits("b/0")
    assert plan_in(job.park_all(passed=9)).members[2].slot == "b/1"


def test_two_slow_ranks_go_one_after_the_other_the_slower_first(job: CoreHarness) -> None:
    generation = Generation(job.view.generation)
    slow = (slow_rank(1, "a/1", 1.4), slow_rank(4, "c/0", 2.0))
    assert list(swapped(job, job.tell(SlowRanksChanged(generation=generation, slow=slow)))) == [4]
    assert list(swapped(job, job.are_slow(1))) == [1]


def test_without_a_spare_it_stays_until_one_is_ready(job: CoreHarness) -> None:
    for slot in ("d/0", "d/1", "e/0", "e/1"):
        job.checks(slot, "its driver does not answer")
    assert not every(PauseWorkers, job.are_slow(3))
    assert every(PauseWorkers, job.checks("d/0"))


def test_a_rank_that_recovers_before_it_is_replaced_stays(job: CoreHarness) -> None:
    job.are_slow(3)
    job.are_slow()
    paused = job.pause_all()
    assert not condemned(paused)
    assert "called off" in only(BreakGeneration, paused).because
    assert not any(why for tray in job.view.trays for why in tray.against.values())


def test_a_rank_that_is_slow_wherever_it_sits_is_not_moved_again(job: CoreHarness) -> None:
    swapped(job, job.are_slow(3))
    answers = job.are_slow(3)
    assert not every(PauseWorkers, answers)
    assert "rank 3 is slow, and not replaced: it was replaced for that a short time ago" in texts(answers)[-1]
    assert not any("not replaced" in text for text in texts(job.are_slow(3))), "once"


def test_a_long_time_later_it_may_move_again(job: CoreHarness) -> None:
    swapped(job, job.are_slow(3))
    job.now += WITHIN_MS
    assert list(swapped(job, job.are_slow(3))) == [3]


def test_after_some_swaps_nothing_more_goes_until_a_person_has_looked() -> None:
    harness = trained("swap", trays="abcdefgh", spares=8)
    for rank in range(SWAPS_MAX):
        swapped(harness, harness.are_slow(rank))
    answers = harness.are_slow(5)
    assert not every(PauseWorkers, answers)
    assert "until a person has looked" in texts(answers)[-1]
    assert list(swapped(harness, harness.tell(BreakerClosed()))) == [5]


def test_who_was_slow_and_is_no_rank_of_a_smaller_world_is_not_looked_for() -> None:
    harness = trained("swap", trays="abcdefgh", spares=8, min_ranks=1)
    for rank in range(SWAPS_MAX):
        swapped(harness, harness.are_slow(rank))
    harness.are_slow(7)
    harness.tell(ShrinkRequested(request="s", to=4, steps=9))
    harness.pause_all()
    harness.park_all(passed=9)
    harness.resume_all()
    assert harness.view.world_size == 4
    assert not every(PauseWorkers, harness.tell(BreakerClosed()))


def test_a_loss_in_the_middle_of_the_pause_is_recovered_and_the_swap_comes_after(job: CoreHarness) -> None:
    job.are_slow(3)
    job.pauses("a/0")
    only(BreakGeneration, job.exits("c/0"))
    job.park_all()
    assert only(PauseWorkers, job.resume_all()).generation == job.view.generation


def test_a_slow_gpu_that_dies_is_fenced_at_once() -> None:
    harness = trained("swap")
    harness.are_slow(3)
    assert only_condemned(harness.judges("b/1", Health.LOST)).slot == "b/1"


def test_a_tray_that_comes_back_is_not_on_probation() -> None:
    harness = trained("swap")
    swapped(harness, harness.are_slow(3))
    harness.tray_lost("b")
    harness.join("b", 2, clique="x")
    assert not any(why for tray in harness.view.trays for why in tray.against.values())


def test_a_slot_that_a_person_gives_back_is_not_on_probation(job: CoreHarness) -> None:
    swapped(job, job.are_slow(3))
    answer = only(Answer, job.tell(ReturnRequested(request="1", target="b/1")))
    assert (answer.outcome, answer.forgiven) == ("done", ("b/1",))
    job.exits("b/0")
    assert plan_in(job.park_all(passed=9)).members[2].slot == "b/1", "its own tray's spare is the first choice again"


def test_a_slow_rank_that_recovers_ends_only_the_probation_that_its_slowness_began() -> None:
    harness = trained("swap", trays="abc", spares=0)
    harness.are_slow(3)
    for _ in range(STANDSTILLS_MAX):
        harness.stands_still("b")
    harness.are_slow()
    against = {slot: why for tray in harness.view.trays for slot, why in tray.against.items()}
    assert against == dict.fromkeys(("b/0", "b/1"), "its tray stood still 3 times within 10 minutes")


def test_a_job_that_ends_swaps_nothing(job: CoreHarness) -> None:
    job.finishes("a/0")
    assert not every(PauseWorkers, job.are_slow(3))
