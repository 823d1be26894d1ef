"""What is done when replicas differ: nothing later than the last good step is used, and whoever is wrong goes, if somebody can come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rackrun.core.faults.corruption import OFFENCES_MAX, WITHIN_MS
from rackrun.core.faults.standstills import STANDSTILLS_MAX
from rackrun.core.policy.choice import parse_rules
from rackrun.protocol.commands import (
    Answer,
    BreakGeneration,
    Command,
    Decided,
    FenceWorker,
    Notice,
    PauseWorkers,
    ResumeGeneration,
)
from rackrun.protocol.events import LossNotRepeated, PolicyRequested, ReplicasDiffer, ShrinkRequested
from rackrun.protocol.ids import BEGIN, Generation, Position, Rank, SlotId, TrayId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in


@pytest.fixture
def job() -> CoreHarness:
    """Ranks 0 to 3 on a and b, all replicas of each other; c waits."""
    return trained("abc", spares=2)


def trained(trays: str, spares: int, min_ranks: int = 0) -> CoreHarness:
    harness = CoreHarness(JobConfig(trays_min=len(trays), trays_max=len(trays), spares=spares, min_ranks=min_ranks))
    harness.resizes = "in place" if min_ranks else ""
    for tray in trays:
        harness.join(tray, 2)
    harness.train()
    return harness


def differ(
    harness: CoreHarness,
    *culprits: int,
    slot: str = "a/0",
    good: int = 3,
    at: int = 8,
    again: tuple[int, ...] | None = None,
    of: int | None = None,
) -> Sequence[Command]:
    """``again``: it is the second time that nobody can say, and these differ."""
    return harness.tell(
        ReplicasDiffer(
            **harness._who(slot),
            generation=Generation(of or harness.view.generation),
            at=Position(at),
            culprits=tuple(Rank(rank) for rank in culprits),
            good=Position(good),
            again=again is not None,
            differing=tuple(Rank(rank) for rank in again or ()),
        )
    )


def texts(answers: Sequence[Command]) -> list[str]:
    return [notice.text for notice in every(Notice, answers)]


def gone(harness: CoreHarness, answers: Sequence[Command]) -> list[SlotId]:
    """Who is fenced; and they exit."""
    slots = [command.slot for command in every(FenceWorker, answers)]
    for slot in slots:
        harness.exits(slot, snapshots=(3, 7))
    return slots


def test_whoever_is_outvoted_is_replaced_and_all_go_back_to_where_they_were_equal(job: CoreHarness) -> None:
    answers = differ(job, 2)
    assert texts(answers) == [
        "rank 2 holds another state than its replicas, seen in step 8; good is what was there after step 3"
    ]
    only(BreakGeneration, answers)
    assert gone(job, answers) == ["b/0"]
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.rollback, plan.committed) == (3, Position(7))
    (restore,) = plan.restores
    assert (restore.rank, restore.snapshot) == (2, ""), "what it has left is not used, not even of step 3"
    assert [member.slot for member in plan.members][2] in ("c/0", "c/1")


def test_what_all_tell_is_heard_once(job: CoreHarness) -> None:
    first = differ(job, 2)
    generation = job.view.generation - 1
    for slot in ("a/1", "b/1"):
        assert not differ(job, 2, slot=slot, of=generation)
    assert len(gone(job, first)) == 1


def test_of_another_generation_it_is_ignored(job: CoreHarness) -> None:
    assert not differ(job, 2, of=7)


def test_good_up_to_what_is_committed_nobody_goes_back(job: CoreHarness) -> None:
    gone(job, differ(job, 2, good=7))
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.rollback, plan.committed) == (None, Position(7))


def test_without_a_spare_it_stays_and_takes_the_state_of_another() -> None:
    harness = trained("ab", spares=0)
    answers = differ(harness, 2, good=7)
    assert not every(FenceWorker, answers)
    assert "no spare is ready, so it stays for now" in texts(answers)[0]
    plan = plan_in(harness.park_all(passed=7))
    assert [(restore.rank, restore.sources) for restore in plan.restores] == [(2, (0, 1, 3))]
    assert [member.rank for member in plan.members if member.fresh] == [2]


def test_it_stays_and_is_lost_before_it_has_another_state_then_what_it_has_left_is_not_used(job: CoreHarness) -> None:
    for slot in ("c/0", "c/1"):
        job.checks(slot, "its driver does not answer")
    assert not every(FenceWorker, differ(job, 2))
    job.exits("b/0", snapshots=(3, 7))
    job.checks("c/0")
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert plan.rollback == 3
    assert [(restore.rank, restore.sources) for restore in plan.restores] == [(2, (0, 1, 3))]


def test_it_stays_and_is_lost_after_it_has_taken_another_state_then_what_it_has_left_is_as_good_as_any(
    job: CoreHarness,
) -> None:
    for slot in ("c/0", "c/1"):
        job.checks(slot, "its driver does not answer")
    differ(job, 2)
    job.park_all(passed=7, snapshots=(3, 7))
    job.resume_all()
    job.exits("b/0", snapshots=(9,))
    differ(job, good=9, at=10, of=job.view.generation - 1)
    job.checks("c/0")
    plan = plan_in(job.park_all(passed=9, snapshots=(9,)))
    assert [(restore.rank, restore.snapshot) for restore in plan.restores] == [(2, "b:2/b/0/3")]


def test_a_policy_that_has_come_to_forbid_swaps_forbids_this_one_too(job: CoreHarness) -> None:
    job.tell(PolicyRequested(request="p", policy="no-swap"))
    assert not every(FenceWorker, differ(job, 2))
    job.tell(PolicyRequested(request="p", policy="cheapest"))
    job.park_all(passed=7, snapshots=(3,))
    job.resume_all()
    assert gone(job, differ(job, 1)) == ["a/1"]


def test_it_leaves_as_soon_as_a_better_slot_has_a_spare(job: CoreHarness) -> None:
    for slot in ("c/0", "c/1"):
        job.checks(slot, "its driver does not answer")
    assert not every(FenceWorker, differ(job, 2))
    job.park_all(passed=7, snapshots=(3,))
    job.resume_all()
    assert "rank 2 on b/0 had another state than its replicas" in only(PauseWorkers, job.checks("c/0")).because


def test_a_rank_that_came_to_its_slot_since_leaves_without_the_blame(job: CoreHarness) -> None:
    """Rank 3 is put on the slot that rank 2 had, as nothing better is left, and leaves it for a better one."""
    gone(job, differ(job, 2))
    job.park_all(passed=7, snapshots=(3,))
    job.resume_all()
    job.ready("b/0")
    job.checks("c/1", "its driver does not answer")
    job.exits("b/1")
    job.park_all(passed=9)
    job.resume_all()
    assert "b/0" in job.members
    pause = only(PauseWorkers, job.checks("c/1"))
    assert "rank 3: rank 2 on b/0 had another state than its replicas, seen in step 8" in pause.because


def test_its_slot_is_the_last_choice_from_then_on(job: CoreHarness) -> None:
    gone(job, differ(job, 2))
    assert any("rank 2 on b/0 had another state" in why for tray in job.view.trays for why in tray.against.values())


def test_a_newcomer_whose_sources_differ_keeps_its_place_and_all_go_back(job: CoreHarness) -> None:
    job.exits("b/0")
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    newcomer = plan.members[2].slot
    assert not job.finds_sources_differ(newcomer, generation=plan.generation - 1)
    answers = job.finds_sources_differ(newcomer)
    assert only(BreakGeneration, answers).because == "its sources differ"
    assert not every(FenceWorker, answers)
    job.timer("gather")
    told = [job.parks(slot, 7, snapshots=(3, 7), good=3) for slot in ("a/0", "a/1", "b/1")]
    assert told
    again = plan_in(job.parks(newcomer, 7))
    assert again.rollback == 3
    assert [member.slot for member in again.members] == [member.slot for member in plan.members]


def test_nobody_can_say_then_all_compute_again(job: CoreHarness) -> None:
    answers = differ(job)
    assert not every(FenceWorker, answers)
    assert "nobody can say which are right: all compute again" in texts(answers)[0]
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.rollback, plan.restores) == (3, ())


def test_nobody_can_say_then_what_is_in_memory_is_not_used_even_of_the_good_step(job: CoreHarness) -> None:
    """All have just gone back there, and one of them is wrong again."""
    differ(job, good=7)
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.rollback, plan.anew, plan.restores) == (7, True, ())


def test_nobody_can_say_and_no_snapshot_is_left_then_memory_is_not_used_either_and_all_begin_again() -> None:
    """Three replicas that are compared at every step keep no snapshot; one is lost, and a bit of another flips in the
    step that the two of them compute again."""
    told = trained("ab", spares=1, min_ranks=1)
    told.exits("a/1")
    told.park_all(passed=7)
    told.resume_all()
    differ(told, good=7)
    answers = told.park_all(passed=7)
    assert not every(ResumeGeneration, answers), "one of the two is wrong, and both would only show it again"
    assert only(Decided, answers).decision.rung is Rung.RESTART


def test_nobody_can_say_and_nothing_is_left_then_a_job_that_may_not_begin_again_ends_and_says_why() -> None:
    told = trained("ab", spares=0)
    differ(told, good=17, at=18)
    stop = stop_in(told.park_all(passed=17))
    assert stop.exit_code == 3
    assert "nobody can say which state in memory is right, and no snapshot of a good one is left" in stop.because


@pytest.mark.parametrize("snapshots", [(), (7,)])
def test_nobody_can_say_then_the_one_that_replaces_another_has_its_state_from_a_snapshot_or_not_at_all(
    job: CoreHarness, snapshots: tuple[int, ...]
) -> None:
    """Whoever stays may be the one that is wrong."""
    gone(job, differ(job, again=(0, 2), good=7))
    answers = job.park_all(passed=7, snapshots=snapshots)
    if snapshots:
        assert plan_in(answers).rollback == 7
    else:
        assert not every(ResumeGeneration, answers)


@pytest.mark.parametrize("snapshots", [(), (7,)])
@pytest.mark.parametrize("resizes", ["in place", "entering main again"])
def test_nobody_can_say_then_the_others_go_on_without_a_lost_rank_from_a_snapshot_or_not_at_all(
    resizes: str, snapshots: tuple[int, ...]
) -> None:
    told = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, min_ranks=1, rules=parse_rules("shrink,stop")))
    told.resizes = resizes
    for tray in "ab":
        told.join(tray, 2)
    told.train()
    generation = told.view.generation
    told.exits("b/1", snapshots=snapshots)
    differ(told, good=7, of=generation)
    answers = told.park_all(passed=7, snapshots=snapshots)
    if not snapshots:
        assert stop_in(answers).exit_code == 3
        return
    plan = plan_in(answers)
    assert (plan.world_size, plan.committed, plan.rollback) == (3, Position(7), 7)


def test_nobody_can_say_twice_then_one_of_them_is_replaced_and_both_are_watched(job: CoreHarness) -> None:
    answers = differ(job, again=(0, 2))
    (text,) = texts(answers)
    assert "once more: ranks 0, 2; rank 2 is replaced, and if they differ on, it was not that one" in text
    assert gone(job, answers) == ["b/0"]
    assert plan_in(job.park_all(passed=7, snapshots=(3, 7))).rollback == 3
    against = [
        slot for tray in job.view.trays for slot, why in tray.against.items() if "or its replica was wrong" in why
    ]
    assert against == ["a/0", "b/0"]


def test_if_they_differ_on_it_was_the_other() -> None:
    harness = trained("abc", spares=1)
    gone(harness, differ(harness, again=(0, 2)))
    harness.park_all(passed=7, snapshots=(3, 7))
    harness.resume_all()
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    assert gone(harness, differ(harness, slot="a/1", again=(0, 2))) == ["a/0"]


def test_that_a_tray_stood_still_says_nothing_about_what_is_computed_there() -> None:
    harness = trained("abc", spares=2)
    for _ in range(STANDSTILLS_MAX):
        harness.stands_still("c")
    gone(harness, differ(harness, again=(0, 2)))
    harness.park_all(passed=7, snapshots=(3, 7))
    harness.resume_all()
    assert harness.view.ranks[2].slot in ("c/0", "c/1"), "the last choice, and the only one"
    assert gone(harness, differ(harness, slot="a/1", again=(0, 2))) == ["a/0"]


def test_the_other_leaves_as_soon_as_there_is_a_better_slot(job: CoreHarness) -> None:
    gone(job, differ(job, again=(0, 2)))
    job.park_all(passed=7, snapshots=(3, 7))
    assert "rank 0 on a/0 or its replica was wrong" in only(PauseWorkers, job.resume_all()).because


def test_if_that_does_not_help_the_job_ends() -> None:
    harness = trained("abc", spares=1)
    for _ in range(OFFENCES_MAX):
        gone(harness, differ(harness, slot="a/1", again=(0, 2)))
        harness.park_all(passed=7, snapshots=(3, 7))
        harness.resume_all()
        for spare in harness.view.spares:
            harness.ready(spare.slot)
    assert stop_in(differ(harness, slot="a/1", again=(0, 2))).exit_code == 3


def test_nobody_can_say_twice_and_no_spare_is_ready_then_the_job_ends() -> None:
    harness = trained("ab", spares=0)
    stop = stop_in(differ(harness, again=(0, 2)))
    assert stop.exit_code == 3
    assert "nobody can say which are right" in stop.because


def test_one_of_them_is_lost_already_then_it_is_not_replaced_twice(job: CoreHarness) -> None:
    job.exits("b/0", snapshots=(3, 7))
    answers = differ(job, again=(0, 2), of=job.view.generation - 1)
    assert not every(FenceWorker, answers)
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.rollback, [restore.rank for restore in plan.restores]) == (3, [2])


def test_a_loss_while_all_go_back_does_not_make_a_later_state_good(job: CoreHarness) -> None:
    gone(job, differ(job, 2))
    job.park_all(passed=7, snapshots=(3, 7))
    only(BreakGeneration, job.exits("b/1", snapshots=(3, 7)))
    assert plan_in(job.park_all(passed=7, snapshots=(3, 7))).rollback == 3


def test_when_all_compute_again_every_state_is_good(job: CoreHarness) -> None:
    gone(job, differ(job, 2))
    job.park_all(passed=7, snapshots=(3, 7))
    job.resume_all()
    job.exits("b/1")
    assert plan_in(job.park_all(passed=9)).rollback is None


def test_told_after_a_loss_has_broken_the_generation_it_counts(job: CoreHarness) -> None:
    job.exits("a/1", snapshots=(3, 7))
    assert gone(job, differ(job, 2, of=job.view.generation - 1)) == ["b/0"]
    plan = plan_in(job.park_all(passed=7, snapshots=(3, 7)))
    assert plan.rollback == 3
    assert {restore.rank for restore in plan.restores} == {1, 2}


def test_the_same_rank_on_another_gpu_soon_after_is_the_scripts_doing(job: CoreHarness) -> None:
    gone(job, differ(job, 2))
    job.park_all(passed=7, snapshots=(3, 7))
    job.resume_all()
    for spare in job.view.spares:
        job.ready(spare.slot)
    stop = stop_in(differ(job, 2, good=11, at=16))
    assert stop.exit_code == 1
    assert "it is not the GPU" in stop.because


def test_a_long_time_later_it_is_not(job: CoreHarness) -> None:
    gone(job, differ(job, 2))
    job.park_all(passed=7, snapshots=(3, 7))
    job.resume_all()
    for spare in job.view.spares:
        job.ready(spare.slot)
    job.now += WITHIN_MS
    assert gone(job, differ(job, 2, good=11, at=16))


def test_in_a_world_of_another_size_the_same_number_is_another_rank() -> None:
    harness = trained("abc", spares=2, min_ranks=1)
    gone(harness, differ(harness, 2))
    harness.park_all(passed=7, snapshots=(3, 7))
    harness.resume_all()
    harness.tell(ShrinkRequested(request="s", ranks=(Rank(2),), steps=9))
    harness.pause_all()
    gone(harness, harness.park_all(passed=9))
    harness.resume_all()
    assert harness.view.ranks[2].slot == "b/1", "it was rank 3"
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    assert gone(harness, differ(harness, 2, good=11, at=16)) == ["b/1"]


def test_a_gpu_that_is_wrong_again_and_again_and_cannot_be_left_ends_the_job() -> None:
    harness = trained("ab", spares=0)
    for _ in range(OFFENCES_MAX - 1):
        differ(harness, 2)
        harness.park_all(passed=7, snapshots=(3,))
        harness.resume_all()
    stop = stop_in(differ(harness, 2))
    assert stop.exit_code == 3
    assert f"for the {OFFENCES_MAX}. time on b/0, and there is no spare" in stop.because


def test_where_nothing_is_known_to_be_good_there_is_nothing_to_go_on_from(job: CoreHarness) -> None:
    answers = gone(job, differ(job, 2, good=BEGIN.step, at=30))
    assert answers
    stop = stop_in(job.park_all(passed=29, snapshots=(28,)))
    assert stop.exit_code == 3


# -- a loss that is not finite once ----------------------------------------------------------------------------------
def once(harness: CoreHarness, slot: str, at: int = 5) -> Sequence[Command]:
    return harness.tell(LossNotRepeated(**harness._who(slot), at=Position(at)))


def test_the_first_loss_that_does_not_come_again_is_said_and_no_more(job: CoreHarness) -> None:
    answers = once(job, "b/0")
    assert texts(answers) == ["rank 2 on b/0: its loss in step 5 was not finite, and was when computed once more"]
    assert len(answers) == 1
    assert len(once(job, "a/0")) == 1, "each slot has its own first time"


def test_the_second_on_a_slot_makes_its_rank_leave(job: CoreHarness) -> None:
    once(job, "b/0")
    pause = only(PauseWorkers, once(job, "b/0", at=90))
    assert "its loss was not finite" in pause.because


def test_without_a_spare_it_stays_on_probation() -> None:
    harness = trained("ab", spares=0)
    once(harness, "b/0")
    assert not every(PauseWorkers, once(harness, "b/0"))
    assert any("its loss was not finite" in why for tray in harness.view.trays for why in tray.against.values())


def test_of_a_tray_that_was_lost_nothing_is_remembered(job: CoreHarness) -> None:
    once(job, "b/0")
    job.core._rack.devices.forget(TrayId("b"))
    assert len(once(job, "b/0")) == 1


# -- where all enter main again -------------------------------------------------------------------------------------------
def test_a_lie_that_is_found_before_all_are_known_to_have_entered_main_again_counts_for_the_old_world_too() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, min_ranks=1, rules=parse_rules("shrink,stop")))
    harness.resizes = "entering main again"
    for tray in "ab":
        harness.join(tray, 2)
    harness.train("pair")
    harness.exits("b/1", snapshots=(3, 7))
    plan = plan_in(harness.park_all(passed=7, snapshots=(3, 7)))
    assert (plan.world_size, plan.committed) == (3, Position(7))
    harness.resumes("a/0")
    harness.resumes("a/1")
    differ(harness, good=3)  # at the first gate; that b/0 is there too has not been heard yet
    harness.timer("gather")
    for slot in ("a/0", "a/1"):
        harness.parks(slot, 7, snapshots=(3, 7), layout=0)
    plan = plan_in(harness.parks("b/0", 7, snapshots=(3, 7), layout=0))
    assert plan.reshard is not None
    assert plan.committed == Position(3), "what was there after step 7 is not to be trusted"


@pytest.mark.parametrize("broken_by", ["the verdict", "a loss"])
def test_a_state_found_wrong_is_not_used_although_its_rank_shows_later_that_it_had_resumed(broken_by: str) -> None:
    harness = trained("ab", spares=0)
    harness.is_severed("a/0")
    harness.park_all(passed=7)
    generation = harness.view.generation
    for slot in ("a/0", "a/1", "b/1"):
        harness.resumes(slot)  # the report of b/0, rank 2, is late
    if broken_by == "a loss":
        harness.is_severed("a/1")
    differ(harness, 2, good=7, of=generation)
    harness.timer("gather")
    for slot in ("a/0", "a/1", "b/1"):
        harness.parks(slot, 7, resumed=generation)
    plan = plan_in(harness.parks("b/0", 7, resumed=generation))
    assert [(restore.rank, restore.sources) for restore in plan.restores] == [(2, (0, 1, 3))]


# -- while a person's shrink is under way ---------------------------------------------------------------------------------
def test_a_lie_while_all_park_for_a_shrink_comes_first_and_the_shrink_goes_on() -> None:
    harness = trained("ab", spares=0, min_ranks=1)
    harness.tell(ShrinkRequested(request="s", to=3, steps=9))
    out = list(harness.pause_all())
    only(BreakGeneration, out)
    out += differ(harness, 2, of=harness.view.generation - 1)
    out += harness.park_all(passed=7, snapshots=(3,))
    plan = plan_in(out)
    assert (plan.rollback, plan.world_size) == (3, 4)
    out += harness.resume_all()
    assert [answer.outcome for answer in every(Answer, out)] == []
    assert only(PauseWorkers, out[-3:]).because == "rank 2 will leave (rackctl shrink)"
