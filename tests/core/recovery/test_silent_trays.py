"""Of a tray of which nothing has come in a recovery: when its ranks are waited for, and when they are replaced."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.protocol.commands import Command, Decided, FenceWorker, GenerationPlan, Notice, SetTimer, StopJob
from rackrun.protocol.events import StopRequested
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Rung
from rackrun.protocol.timers import RecoverOver
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in

PARK_MS, LEASE_MS = JobConfig(trays_min=1, trays_max=1, spares=0).park_timeout_ms, 15_000


def training(*, spares: int = 0, classes: str = "all") -> CoreHarness:
    """Three trays of two slots, and a fourth for as many spares. Without ``classes`` all ranks have the same state."""
    trays = 3 + bool(spares)
    told = CoreHarness(JobConfig(trays_min=trays, trays_max=trays, spares=spares, lease_ms=LEASE_MS))
    for tray in "abcd"[:trays]:
        told.join(tray, spares if tray == "d" else 2)
    told.train(classes)
    return told


def breaks_while_b_is_silent(told: CoreHarness) -> Sequence[Command]:
    """Rank 0 is lost; all others park but those on b, for as long as parking may take."""
    told.exits("a/0", signal=9)
    told.timer("gather")
    for slot in ("a/1", "c/0", "c/1"):
        told.parks(slot, passed=4)
    told.now += PARK_MS
    return told.timer("park")


def kept(plan: GenerationPlan) -> list[str]:
    return [member.slot for member in plan.members if not member.fresh]


def test_without_spares_for_them_the_ranks_of_a_silent_tray_are_waited_for() -> None:
    told = training()
    answers = breaks_while_b_is_silent(told)
    assert not every(FenceWorker, answers)
    text = only(Notice, answers).text
    assert (
        text == "nothing has come from b since rank 0 lost (SIGKILL); its ranks are waited for, up to the lease of 15 s"
    )
    assert [str(one.timer) for one in every(SetTimer, answers) if one.at_ms == told.now + LEASE_MS] == ["park:2"]


def test_a_silent_tray_that_is_back_within_its_lease_keeps_its_ranks() -> None:
    told = training()
    breaks_while_b_is_silent(told)
    told.now += 4_000
    told.stands_still("b", for_ms=8_000)
    told.parks("b/0", passed=4)
    told.parks("b/1", passed=4)
    plan = plan_in(told.ready("a/0"))
    assert kept(plan) == ["a/1", "b/0", "b/1", "c/0", "c/1"]
    assert plan.rollback is None


def test_a_silent_tray_that_is_given_up_meanwhile_is_not_waited_for_any_longer() -> None:
    told = training()
    breaks_while_b_is_silent(told)
    assert only(Decided, told.tray_lost("b")).failure.ranks == (0, 2, 3)


def test_a_tray_that_is_never_given_up_and_never_parks_is_waited_for_once() -> None:
    told = training()
    breaks_while_b_is_silent(told)
    told.now += LEASE_MS
    fenced = every(FenceWorker, told.timer("park"))
    assert [one.slot for one in fenced] == ["b/0", "b/1"]
    assert {one.because for one in fenced} == {f"did not park within {PARK_MS + LEASE_MS} ms"}


def test_spares_that_are_ready_take_over_at_once_instead_of_a_wait() -> None:
    told = training(spares=3)
    answers = breaks_while_b_is_silent(told)
    assert [one.slot for one in every(FenceWorker, answers)] == ["b/0", "b/1"]
    assert {member.slot for member in plan_in(answers).members if member.fresh} == {"d/0", "d/1", "d/2"}


def test_too_few_spares_for_the_lost_and_the_silent_ranks_take_over_after_the_wait() -> None:
    told = training(spares=2)
    assert not every(FenceWorker, breaks_while_b_is_silent(told))
    told.parks("b/0", passed=4)
    plan = plan_in(told.parks("b/1", passed=4))
    assert [member.slot for member in plan.members if member.fresh] == ["d/0"]


def test_what_only_a_silent_tray_has_is_waited_for_even_if_there_are_spares() -> None:
    told = training(spares=3, classes="unique")
    assert not every(FenceWorker, breaks_while_b_is_silent(told))


def test_if_all_trays_are_silent_none_is_condemned_before_its_lease_is_over() -> None:
    told = training()
    told.exits("a/0", signal=9)
    told.timer("gather")
    answers = told.timer("park")
    assert not every(FenceWorker, answers)
    assert only(Notice, answers).text.startswith("nothing has come from a, b, c since")


def test_one_rank_that_does_not_park_on_a_tray_that_is_heard_is_not_waited_for() -> None:
    told = training()
    told.exits("a/0", signal=9)
    told.timer("gather")
    for slot in ("a/1", "b/0", "c/0", "c/1"):
        told.parks(slot, passed=4)
    assert only(FenceWorker, told.timer("park")).slot == "b/1"


def test_a_rank_that_does_not_park_is_fenced_while_a_silent_tray_is_waited_for() -> None:
    told = training()
    told.exits("a/0", signal=9)
    told.timer("gather")
    for slot in ("a/1", "c/0"):
        told.parks(slot, passed=4)
    assert only(FenceWorker, told.timer("park")).slot == "c/1"
    told.parks("b/0", passed=4)
    assert only(Decided, told.parks("b/1", passed=4)).failure.ranks == (0, 5)


def test_the_time_for_which_a_silent_tray_is_waited_for_does_not_count_against_that_of_spares() -> None:
    told = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0, lease_ms=LEASE_MS, join_timeout_ms=10_000))
    told.join("a", 2)
    told.join("b", 2)
    told.train()
    told.exits("a/0", signal=9)
    told.timer("gather")
    told.parks("a/1", passed=4)
    told.now += PARK_MS
    told.timer("park")
    told.now = 10_000
    assert not told.timer("recover"), "nobody could decide anything so far"
    told.now = 12_000
    told.parks("b/0", passed=4)
    answers = told.parks("b/1", passed=4)
    decision = only(Decided, answers).decision
    assert (decision.rung, decision.deadline_s) == (Rung.WAIT, 10.0)
    assert [one.at_ms for one in every(SetTimer, answers) if isinstance(one.timer, RecoverOver)] == [22_000]
    told.now = 21_999
    assert not every(StopJob, told.timer("recover")), "there may be earlier timers"
    told.now = 22_000
    assert every(StopJob, told.timer("recover"))


def test_the_time_of_a_rank_that_works_on_does_not_count_against_that_of_spares() -> None:
    told = training()
    told.exits("a/0", signal=9)
    told.timer("gather")
    for slot in ("a/1", "b/0", "b/1", "c/0"):
        told.parks(slot, passed=4)
    while told.now < 700_000:
        told.works("c/1", awaited=True)
        told.now += PARK_MS
        assert not every(FenceWorker, told.timer("park"))
        if told.now == 600_000:
            assert not every(StopJob, told.timer("recover"))
    decision = only(Decided, told.parks("c/1", passed=4)).decision
    assert (decision.rung, decision.deadline_s) == (Rung.WAIT, 600.0)
    assert plan_in(told.ready("a/0")).generation == 2


def test_a_stop_that_was_asked_for_while_a_silent_tray_is_waited_for_has_its_own_exit_code() -> None:
    """Also if the job could not have gone on anyway."""
    told = training(classes="")
    breaks_while_b_is_silent(told)
    told.tell(StopRequested(because="rackctl stop", exit_code=143))
    told.tray_lost("b")
    while told.view.phase != "stopped":
        told.now += 600_000
        told.timer("owed")
        told.timer("recover")
    stopped = stop_in(told.answers)
    assert stopped.exit_code == 143
    assert stopped.because.startswith("rackctl stop; no step boundary came: ")
    assert "lost" in stopped.because
