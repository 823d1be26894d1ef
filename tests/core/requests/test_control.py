"""What a person may ask of a job that runs, what comes of it, and why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from rackrun.protocol.commands import (
    Answer,
    BreakGeneration,
    Command,
    DismissTray,
    DrainWorkers,
    PauseWorkers,
    ResumeGeneration,
    StartWorker,
    StopJob,
)
from rackrun.protocol.events import DepartureAnnounced, DrainRequested, ReturnRequested, StopRequested, SwapRequested
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Position, Rank, TrayId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, condemned, every, only, only_condemned, plan_in, ranks, stop_in


class Asked(CoreHarness):
    """Requests are named by their number."""

    requests = 0

    def _name(self) -> str:
        self.requests += 1
        return str(self.requests)

    def drain(self, target: str, because: str = "", *, wait: bool = False, steps: int = 9) -> Sequence[Command]:
        return self.tell(DrainRequested(request=self._name(), target=target, because=because, wait=wait, steps=steps))

    def give_back(self, target: str) -> Sequence[Command]:
        return self.tell(ReturnRequested(request=self._name(), target=target))

    def swap(self, rank: int, to: str = "", *, steps: int = 9) -> Sequence[Command]:
        return self.tell(SwapRequested(request=self._name(), rank=Rank(rank), to=to, steps=steps))

    def leaves(self, tray: str) -> Sequence[Command]:
        return self.tell(DepartureAnnounced(tray=TrayId(tray), because="SIGTERM", exit_code=143))

    def moves(self, passed: int = 7, snapshots: Sequence[int] = ()) -> Sequence[Command]:
        """All pause, who leaves is gone, and all resume."""
        out = list(self.pause_all())
        fenced = [command.slot for command in condemned(out)]
        out += self.park_all(passed, snapshots=snapshots)
        for slot in fenced:
            out += self.exits(slot, snapshots=snapshots)
        return [*out, *self.resume_all()]


def job(trays: str = "abcd", *, spares: int = 2, slots: int = 2, classes: str = "all", clique: str = "") -> Asked:
    harness = Asked(JobConfig(trays_min=len(trays), trays_max=len(trays), spares=spares))
    for tray in trays:
        harness.join(tray, slots, clique=clique)
    harness.train(classes)
    return harness


@pytest.fixture(params=["", "x"], ids=["nothing is known of the rack", "one clique"])
def four(request: pytest.FixtureRequest) -> Asked:
    """Four trays of two; ranks 0 to 5 on a, b, c; d waits."""
    harness = job(clique=request.param)
    assert [spare.slot for spare in harness.view.spares] == ["d/0", "d/1"]
    return harness


def said(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [(answer.outcome, answer.refusal) for answer in every(Answer, commands)]


# -- drain -----------------------------------------------------------------------------------------------------------
def test_a_drained_trays_ranks_go_to_spares_at_a_step_boundary_and_no_step_is_done_again(four: Asked) -> None:
    begun = four.drain("b", "its fan")
    assert only(Answer, begun).text == "drain of b: ranks 2, 3 will leave at the next step boundary"
    assert len(only(PauseWorkers, begun).workers) == 6
    assert not condemned(begun)
    moved = four.moves(passed=7)
    assert [(fenced.slot, fenced.because) for fenced in condemned(moved)] == [
        ("b/0", "drained: its fan"),
        ("b/1", "drained: its fan"),
    ]
    plan = plan_in(moved)
    assert (plan.committed, plan.rollback) == (Position(7), None)
    assert {plan.members[2].slot, plan.members[3].slot} == {"d/0", "d/1"}
    assert said(moved) == [("done", "")]


def test_it_is_done_when_nobody_is_there_any_more_and_all_train(four: Asked) -> None:
    four.drain("b")
    four.pause_all()
    four.park_all(passed=7)
    four.exits("b/0")
    assert not every(Answer, four.resume_all())
    assert only(Answer, four.exits("b/1")).text == "b is empty"


def test_nothing_starts_there_and_its_spares_end(four: Asked) -> None:
    drained = four.drain("d/0")
    assert only_condemned(drained).slot == "d/0"
    assert not every(PauseWorkers, drained)
    ended = four.exits("d/0")
    assert not every(StartWorker, ended)
    assert only(Answer, ended).text == "d/0 is empty"
    four.exits("a/0")
    assert plan_in(four.park_all()).members[0].slot == "d/1"


def test_spares_of_what_is_drained_wait_until_the_ranks_have_left() -> None:
    """If the drain is called off, they are still there."""
    harness = job("abc", spares=3, slots=3)
    harness.drain("a")
    assert [spare.slot for spare in harness.view.spares] == ["c/0", "c/1", "c/2"]
    harness.give_back("a")
    harness = job("ab", spares=2, slots=3)  # a/2 and b/2 wait
    assert not condemned(harness.drain("a/0"))
    assert only_condemned(harness.pause_all()).slot == "a/0"


def test_a_swap_without_a_spare_is_refused_and_its_remedy_names_no_option_that_it_does_not_have() -> None:
    told = job("ab", spares=0, slots=1)
    answer = only(Answer, told.tell(SwapRequested(request="s", rank=Rank(0), steps=5)))
    assert (answer.outcome, answer.refusal) == ("refused", "spares")
    assert answer.remedy.startswith("ask again when a spare is ready")


@pytest.mark.parametrize("wait", [False, True])
def test_without_enough_spares_it_is_refused_and_nothing_changes_or_it_waits(four: Asked, wait: bool) -> None:
    four.drain("d/0")
    four.exits("d/0")
    answer = only(Answer, four.drain("b", wait=wait))
    assert "ranks 2, 3 would have to move, and 1 spare is left (d/1)" in answer.text
    if not wait:
        assert (answer.outcome, answer.refusal) == ("refused", "spares")
        assert "--wait-for-spares" in answer.remedy
        assert list(answer.drained) == ["d/0"]
        return
    assert answer.outcome == "begun"
    four.give_back("d/0")
    assert every(PauseWorkers, four.ready("d/0"))


def test_a_spare_that_still_starts_counts(four: Asked) -> None:
    four.exits("d/0")
    begun = four.drain("b")
    assert only(Answer, begun).outcome == "begun"
    assert not every(PauseWorkers, begun)
    assert every(PauseWorkers, four.ready("d/0"))


def test_a_spare_that_a_loss_takes_from_a_drain_calls_it_off(four: Asked) -> None:
    four.drain("b")
    four.exits("a/0")
    four.park_all()
    assert not every(Answer, four.resume_all()), "a spare starts where the lost rank was"
    for _ in range(3):
        four.exits("a/0", code=1)
    (answer,) = [one for one in every(Answer, four.answers) if one.outcome == "refused"]
    assert answer.text.startswith("drain of b is called off: ranks 2, 3 would have to move")
    assert not answer.drained
    assert four.view.phase == "training"


def test_a_job_that_needs_what_is_being_drained_keeps_it() -> None:
    harness = job("abc", spares=2)
    harness.drain("b")
    harness.pause_all()
    harness.park_all()
    harness.tray_lost("c")
    answers = harness.park_all()
    kept = [one for one in every(Answer, harness.answers) if one.outcome == "refused"]
    assert [one.text for one in kept] == ["drain of b is called off: the job needs its slots"]
    assert not every(StopJob, answers)
    harness.exits("b/0")
    harness.exits("b/1")
    assert [start.slot for start in every(StartWorker, harness.answers)][-2:] == ["b/0", "b/1"]


def test_what_is_empty_stays_so_even_if_the_job_ends_for_it() -> None:
    """Somebody may have a hand in it."""
    harness = job("abc", spares=2)
    harness.drain("c")
    harness.exits("c/0")
    harness.exits("c/1")
    harness.tray_lost("b")
    stop = stop_in(harness.park_all())
    assert "no free slot left; not used: c/0 (drained), c/1 (drained)" in stop.because


def test_replicas_that_would_all_leave_go_one_after_the_other() -> None:
    """Else nobody would be left to restore them from."""
    harness = job("abc", spares=4)
    assert harness.members == ["a/0", "b/0"]
    harness.drain("a/0")
    harness.drain("b/0")
    again = harness.moves()
    assert [fenced.slot for fenced in condemned(again)] == ["a/0"]
    assert only(PauseWorkers, again).because == "rank 1: drained"
    assert [fenced.slot for fenced in condemned(harness.moves())] == ["b/0"]


def test_a_loss_in_the_middle_of_the_pause_is_recovered_and_the_drain_goes_on(four: Asked) -> None:
    four.drain("b/0")
    four.pauses("a/0")
    only(BreakGeneration, four.exits("c/0"))
    four.park_all()
    assert only(PauseWorkers, four.resume_all()).generation == 2


def test_a_drain_that_is_asked_for_in_a_recovery_comes_after_it(four: Asked) -> None:
    four.exits("a/0")
    assert said(four.drain("b/0")) == [("begun", "")]
    four.park_all()
    assert only(PauseWorkers, four.resume_all()).because == "rank 2: drained"


def test_a_tray_that_comes_back_is_still_drained(four: Asked) -> None:
    four.drain("d")
    four.tray_lost("d")
    assert not every(StartWorker, four.join("d", 2))
    four.give_back("d")
    assert [start.slot for start in every(StartWorker, four.answers)][-2:] == ["d/0", "d/1"]


def test_a_world_that_begins_again_leaves_out_what_is_drained() -> None:
    harness = job("abc", spares=2, classes="unique")
    harness.drain("c/0")
    harness.exits("c/0")
    harness.exits("a/0", step=3)
    harness.park_all(passed=3)
    for slot in ("a/1", "b/0", "b/1", "c/1"):
        harness.exits(slot)
    assert "c/0" not in harness.members
    assert harness.view.phase == "setup"


# -- what a tray keeps for others ------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [*permutations(("a/0", "a/1", "b/0", "b/1"))], ids=" ".join)
def test_a_tray_that_keeps_copies_is_empty_when_they_are_kept_elsewhere(order: tuple[str, ...]) -> None:
    harness = job("abc", spares=2, classes="unique")
    for slot, holder in (("a/0", "b"), ("a/1", "b"), ("b/0", "c"), ("b/1", "c")):
        harness.mirrors(slot, holder, 4)
    drained = harness.drain("c")
    assert "snapshots are kept elsewhere" in only(PauseWorkers, drained).because
    for slot in ("c/0", "c/1"):
        assert not every(Answer, harness.exits(slot))
    resumed = harness.moves()
    assert plan_in(resumed).mirrors == {"a": "b:2/b", "b": "a:2/a", "c": "a:2/a"}
    assert not condemned(resumed)
    copies = [harness.mirrors(slot, "b" if slot < "b" else "a", 8) for slot in order]
    assert [bool(every(Answer, answers)) for answers in copies] == [False, False, False, True]


# -- return ----------------------------------------------------------------------------------------------------------
def test_what_is_returned_is_used_again(four: Asked) -> None:
    four.drain("d")
    four.exits("d/0")
    four.exits("d/1")
    returned = four.give_back("d")
    assert only(Answer, returned).outcome == "done"
    assert [start.slot for start in every(StartWorker, returned)] == ["d/0", "d/1"]


def test_a_return_calls_a_drain_off(four: Asked) -> None:
    four.drain("b")
    answers = every(Answer, four.give_back("b"))
    assert [answer.text for answer in answers] == ["drain of b is called off: b was returned", "b may be used again"]
    paused = four.pause_all()
    assert "called off" in only(BreakGeneration, paused).because
    assert not condemned(paused)


def test_a_gpu_that_is_not_fit_is_not_returned_and_the_reason_is_told(four: Asked) -> None:
    four.drain("d")
    four.exits("d/0")
    four.exits("d/1")
    four.checks("d/1", "its driver does not answer")
    answer = only(Answer, four.give_back("d"))
    assert answer.refusal == "unfit"
    assert "d/1 (its driver does not answer)" in answer.text
    assert answer.remedy == "repair it, or return d/0 alone."
    assert only(Answer, four.give_back("d/0")).outcome == "done"


def test_a_returned_slot_is_forgiven_its_losses() -> None:
    harness = job("abcd")
    for _ in range(3):
        harness.exits("d/0", code=1)
    returned = harness.give_back("d/0")
    assert only(Answer, returned).forgiven == ("d/0",)
    assert only(StartWorker, returned).slot == "d/0"


def test_what_is_in_use_cannot_be_returned(four: Asked) -> None:
    assert said(four.give_back("b")) == [("refused", "taken")]


# -- swap ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", ["", "d/1"])
def test_a_rank_goes_to_the_best_spare_or_to_the_one_that_is_named(four: Asked, to: str) -> None:
    begun = four.swap(3, to)
    assert only(Answer, begun).outcome == "begun"
    moved = four.moves()
    assert only_condemned(moved).slot == "b/1"
    there = ranks(plan_in(moved))[Rank(3)]
    assert there == (to or "d/0")
    assert only(Answer, moved).text == f"rank 3 went from b/1 to {there}"
    assert [start.slot for start in every(StartWorker, moved)] == ["b/1"]


def test_a_rank_that_is_lost_before_its_swap_takes_the_spare_that_was_named(four: Asked) -> None:
    four.swap(3, "d/1")
    four.exits("b/1")
    four.park_all()
    assert only(Answer, four.resume_all()).text == "rank 3 went from b/1 to d/1"


def test_a_named_spare_that_still_starts_is_waited_for_though_another_is_ready(four: Asked) -> None:
    four.exits("d/1")
    assert not every(PauseWorkers, four.swap(3, "d/1"))
    assert every(PauseWorkers, four.ready("d/1"))
    assert ranks(plan_in(four.moves()))[Rank(3)] == "d/1"


def test_a_named_spare_that_is_gone_calls_the_swap_off(four: Asked) -> None:
    four.swap(3, "d/1")
    assert not every(Answer, four.exits("d/1")), "another starts there"
    answers = every(Answer, four.drain("d/1"))
    assert "swap of rank 3 is called off: d/1 is not ready any more" in [one.text for one in answers]


def test_a_spare_outside_the_ranks_clique_is_refused() -> None:
    harness = Asked(JobConfig(trays_min=4, trays_max=4, mesh=(("dp", 2), ("tp", 3)), spares=0))
    for tray in "abcd":
        harness.join(tray, 2, clique="x" if tray in "ab" else "y")
    harness.train()
    assert [spare.slot for spare in harness.view.spares] == ["b/1", "d/1"]
    assert said(harness.swap(0, "d/1")) == [("refused", "spares")]
    assert said(harness.swap(0, "b/1")) == [("begun", "")]


def test_a_refusal_says_why_a_ready_spare_does_not_do() -> None:
    harness = Asked(JobConfig(trays_min=4, trays_max=4, mesh=(("dp", 2), ("tp", 3)), spares=0))
    for tray in "abcd":
        harness.join(tray, 2, clique="x" if tray in "ab" else "y")
    harness.train()
    refused = only(Answer, harness.drain("a"))
    what = "ranks 0, 1 would have to move, and 2 spares are left (b/1, d/1)"
    assert refused.text.endswith(f"{what} outside their NVLink clique")
    assert said(harness.swap(0)) == [("begun", "")]
    assert only(Answer, harness.swap(1)).text.endswith("2 spares are left (b/1, d/1) for what was asked before")


# -- refusals --------------------------------------------------------------------------------------------------------
def test_a_name_that_there_is_not_is_refused_with_the_nearest_one(four: Asked) -> None:
    for answers in (four.drain("d/7"), four.give_back("d/7"), four.swap(0, "d/7")):
        answer = only(Answer, answers)
        assert answer.refusal == "unknown"
        assert answer.remedy.startswith("is d/")
    for name in ("", "d/", "d/-1", "d/x", "/", "d/0/0"):
        assert said(four.drain(name)) == [("refused", "unknown")], name
    assert only(Answer, four.swap(-1)).refusal == "unknown"
    assert only(Answer, four.swap(6)).text == "swap of rank 6 is refused: there are ranks 0 to 5, and no rank 6"


@pytest.mark.parametrize("to", ["a/0", "b/0"])
def test_a_rank_cannot_go_where_nobody_waits(four: Asked, to: str) -> None:
    answer = only(Answer, four.swap(3, to))
    assert answer.refusal == "taken"
    assert answer.remedy == "name one of d/0, d/1."


def test_a_job_before_its_second_step_is_refused(four: Asked) -> None:
    assert said(four.drain("b", steps=1)) == said(four.swap(3, steps=1)) == [("refused", "early")]


def test_a_plain_script_is_refused() -> None:
    harness = Asked(JobConfig(trays_min=1, trays_max=1, spares=0))
    harness.join("a", 2)
    assert said(harness.drain("a/0", steps=0)) == said(harness.swap(1, steps=0)) == [("refused", "plain")]


def test_a_job_that_is_about_to_end_is_refused(four: Asked) -> None:
    four.tell(StopRequested(because="enough", exit_code=143))
    answer = only(Answer, four.drain("b"))
    assert (answer.refusal, "enough" in answer.text) == ("over", True)


# -- notice ----------------------------------------------------------------------------------------------------------
def test_a_tray_that_is_told_to_leave_is_dismissed_when_its_ranks_are_elsewhere(four: Asked) -> None:
    assert every(PauseWorkers, four.leaves("b"))
    moved = four.moves()
    assert only(DismissTray, moved).tray == "b"
    assert said(moved) == [("done", "")]
    assert not every(BreakGeneration, four.tray_lost("b"))
    assert [start.slot for start in every(StartWorker, four.join("b", 2))] == ["b/0", "b/1"], "a new lease"


def test_a_tray_that_leaves_while_ranks_are_there_is_a_loss_with_that_reason() -> None:
    harness = job("abc", spares=0)
    assert not every(PauseWorkers, harness.leaves("b"))
    lost = harness.tray_lost("b")
    assert only(BreakGeneration, lost).because == "ranks 2, 3 lost (b lost: lease lapsed; SIGTERM)"
    assert said(lost) == [("done", "")]


def test_of_two_trays_that_leave_each_goes_when_there_are_spares(four: Asked) -> None:
    four.leaves("b")
    four.leaves("c")
    moved = four.moves()
    assert only(DismissTray, moved).tray == "b"
    assert four.view.phase == "training"


def test_when_the_last_tray_is_told_to_leave_the_job_ends_at_the_next_boundary(four: Asked) -> None:
    for tray in "abc":
        assert not every(DrainWorkers, four.leaves(tray))
    assert "no other tray stays" in only(DrainWorkers, four.leaves("d")).because
    assert not every(StopJob, four.tell(StopRequested(because="SIGTERM", exit_code=143))), "the first that asks"
    assert every(StopJob, four.tell(StopRequested(because="SIGTERM", exit_code=143)))


def test_a_tray_of_a_plain_script_is_dismissed_at_once() -> None:
    harness = Asked(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 2)
    harness.join("b", 2)
    assert only(DismissTray, harness.leaves("a")).tray == "a"


def test_a_failing_gpu_is_left_as_ever_while_a_drain_waits() -> None:
    harness = job("abcd", clique="x")
    harness.drain("d/0")
    harness.exits("d/0")
    harness.drain("b", wait=True)
    assert only(PauseWorkers, harness.judges("c/0", Health.DEGRADED)).because.startswith("rank 4: GPU 0 is degraded")
    assert only(ResumeGeneration, harness.moves()).plan.members[4].slot == "d/1"
