"""What holds for every situation: the same answer to the same question, nothing impossible, no reward for a higher cost."""

from __future__ import annotations

import doctest
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rackrun.policy
from rackrun.core.policy.active_policy import ActivePolicy
from rackrun.errors import UsageError
from rackrun.policy import (
    ClusterView,
    Costs,
    Decision,
    Failure,
    FailureCause,
    Rules,
    Rung,
    Weights,
    choose,
    options,
    parse_rules,
    parse_weights,
    refusal,
)
from rackrun.protocol.ids import Rank, SlotId
from tests.policy.situations import situation

SECONDS = st.none() | st.floats(0.0, 1e4)
COSTS = st.builds(
    Costs,
    step_s=SECONDS,
    regroup_s=SECONDS,
    takeover_s=SECONDS,
    copy_bytes_per_s=st.none() | st.floats(1e6, 1e12),
    state_bytes=st.none() | st.floats(0.0, 1e12),
    start_s=SECONDS,
    repair_s=SECONDS,
    checkpoint_age_s=SECONDS,
)
WEIGHTS = st.builds(Weights, goodput=st.floats(0.0, 10), cost=st.floats(0.0, 10), resilience=st.floats(0.0, 10))
RUNGS = st.lists(st.sampled_from(Rung), unique=True).map(tuple)
RULES = st.builds(Rules, order=RUNGS) | st.builds(
    Rules, never=RUNGS.map(lambda rungs: tuple(rung for rung in rungs if rung is not Rung.STOP))
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Failure, ClusterView]:
    size = draw(st.integers(1, 64))
    numbers = st.integers(0, 8)
    words = [f"{size} ranks", f"{draw(st.integers(0, min(size, 6)))} lost", f"at step {draw(st.integers(-1, 10**6))}"]
    words += [
        f"{draw(numbers)} {name}" for name in ("ready", "starting", "free", "unfit", "returning", "moved", "moving")
    ]
    words += [
        f"rollback {draw(numbers)}",
        f"restarts {draw(st.integers(0, 2))}",
        f"patience {draw(st.integers(0, 4000))} s",
    ]
    words += [f"waited {draw(st.integers(0, 1000))} s"]
    flags = ("begin again", "state lost", "out of reach", "planned", "user bug")
    words += draw(st.lists(st.sampled_from(flags), unique=True, max_size=2))
    failure, view = situation(", ".join(words))
    costs = draw(COSTS)
    return failure, msgspec.structs.replace(view, costs=costs)


@given(situations(), RULES, WEIGHTS)
@settings(max_examples=80, deadline=None)
def test_what_is_chosen_is_possible_and_allowed(
    situated: tuple[Failure, ClusterView], rules: Rules, weights: Weights
) -> None:
    failure, view = situated
    decision = choose(failure, view, rules, weights)
    assert not refusal(decision, failure, view)
    assert decision.reason
    if rules.order and failure.whose is not FailureCause.USER:
        assert decision.rung in (*rules.order, Rung.ABSORB, Rung.STOP)
    assert decision.rung not in rules.never
    assert [one.rung for one in decision.options] == list(Rung)


@given(situations(), RULES, WEIGHTS)
@settings(max_examples=40, deadline=None)
def test_the_same_question_has_the_same_answer_word_for_word(
    situated: tuple[Failure, ClusterView], rules: Rules, weights: Weights
) -> None:
    failure, view = situated
    again = msgspec.convert(
        msgspec.to_builtins((failure, view), str_keys=True), tuple[Failure, ClusterView], strict=False
    )
    assert choose(failure, view, rules, weights) == choose(*again, rules, weights)


@given(
    situations(),
    WEIGHTS,
    st.sampled_from(("step_s", "regroup_s", "takeover_s", "state_bytes", "start_s", "repair_s", "checkpoint_age_s")),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1e4),
)
@settings(max_examples=80, deadline=None)
def test_no_rung_becomes_cheaper_when_something_becomes_dearer(
    situated: tuple[Failure, ClusterView], weights: Weights, name: str, low: float, more: float
) -> None:
    failure, view = situated
    cheap, dear = (
        msgspec.structs.replace(view, costs=msgspec.structs.replace(view.costs, **{name: value}))
        for value in (low, low + more)
    )
    for before, after in zip(options(failure, cheap, weights), options(failure, dear, weights), strict=True):
        assert before.possible == after.possible
        assert after.cost_gpu_s >= before.cost_gpu_s * (1 - 1e-9)


@given(situations(), WEIGHTS, st.floats(1e6, 1e12), st.floats(1.0, 100.0))
@settings(max_examples=40, deadline=None)
def test_a_faster_copy_makes_nothing_dearer(
    situated: tuple[Failure, ClusterView], weights: Weights, rate: float, faster: float
) -> None:
    failure, view = situated
    slow, fast = (
        msgspec.structs.replace(view, costs=msgspec.structs.replace(view.costs, copy_bytes_per_s=value))
        for value in (rate, rate * faster)
    )
    for before, after in zip(options(failure, slow, weights), options(failure, fast, weights), strict=True):
        assert after.cost_gpu_s <= before.cost_gpu_s * (1 + 1e-9)


@given(situations(), WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_the_default_is_the_cheapest_and_stops_only_where_nothing_else_goes_on_by_itself(
    situated: tuple[Failure, ClusterView], weights: Weights
) -> None:
    failure, view = situated
    decision = choose(failure, view, Rules(), weights)
    going_on = [one for one in decision.options if one.possible and one.rung not in (Rung.HOLD, Rung.STOP)]
    assert decision.rung is not Rung.HOLD, "it is taken only where the policy names it"
    if decision.rung is not Rung.STOP:
        assert decision.cost_gpu_s == min(one.cost_gpu_s for one in going_on)
    elif failure.whose is not FailureCause.USER:
        assert all(one.rung is Rung.WAIT and not view.comes_by_itself for one in going_on)


@given(situations(), RULES, st.builds(Weights, goodput=st.sampled_from((0.0, 0.5, 1.0, 3.0)), cost=st.floats(0.0, 10)))
@settings(max_examples=80, deadline=None)
def test_the_sum_that_is_printed_can_be_computed_again(
    situated: tuple[Failure, ClusterView], rules: Rules, weights: Weights
) -> None:
    """Up to its rounding: each number has three digits."""
    failure, view = situated
    decision = choose(failure, view, rules, weights)
    if (found := re.search(r": ([^:;]+) = ([\d.e+-]+) GPU-s", decision.reason)) is None:
        assert decision.rung is Rung.HOLD or " GPU-s" not in decision.reason
        return
    text = re.sub(r"nothing", "0", re.sub(r" s \w+| exposure", "", found[1])).replace(" x ", " * ")
    assert re.fullmatch(r"[\d.e+*() -]+", text), text
    assert float(found[2]) == pytest.approx(decision.cost_gpu_s, rel=6e-3, abs=1e-9)
    assert eval(text) == pytest.approx(decision.cost_gpu_s, rel=2e-2, abs=1e-9), decision.reason


def test_a_cheaper_shrink_that_is_passed_over_is_named_with_the_reason() -> None:
    starts = "1 lost, 1 starting, start 40 s, shrink to 7"
    told = choose(*situation(starts)).reason
    assert told.startswith("wait: 8 x (40 s wait + 2 s takeover + 1 s redone) + 1.15 exposure = 345 GPU-s; ")
    assert 'shrink would be 73.2, but a smaller world computes other bits (no reduction="exact")' in told
    for order, why in (
        ("swap,wait", "the order does not name it"),
        ("swap,wait,shrink", "it stands later in the order"),
    ):
        assert f"; shrink would be 73.2, but {why}" in choose(*situation(starts), parse_rules(order)).reason
    assert (
        "; shrink would be 73.2, but no-shrink forbids it"
        in choose(*situation(starts), parse_rules("no-shrink")).reason
    )
    exact = choose(*situation(f"{starts}, exact"))
    assert (exact.rung, "but" in exact.reason) == (Rung.SHRINK, False)
    assert "; shrink is impossible: " in choose(*situation("1 lost, 1 starting")).reason


def test_a_hold_names_what_the_job_could_do_instead() -> None:
    told = choose(*situation("1 lost, shrink to 7"), parse_rules("swap,hold")).reason
    assert told.endswith(
        "no deadline; before it swap: no spare is ready; shrink would be 1833, but the order does not name it"
    )


def test_a_restart_is_never_taken_instead_of_a_swap_that_takes_nobody_back() -> None:
    """Whatever was measured: what a restart does besides a takeover only comes on top."""
    costs = Costs(start_s=0.0, step_s=0.0, checkpoint_age_s=0.0, takeover_s=50.0)
    failure, view = situation("1 lost, 1 ready, begin again")
    assert choose(failure, msgspec.structs.replace(view, costs=costs)).rung is Rung.SWAP


# -- what a user gives -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["swop", "swap,swap", "swap,no-restart", "no-", "swap;stop"])
def test_a_policy_that_says_nothing_clear_is_refused_with_the_rungs_there_are(text: str) -> None:
    with pytest.raises(UsageError, match=", ".join(rung.value for rung in Rung)):
        parse_rules(text)


@pytest.mark.parametrize("text", ["hold", "wait,hold,stop"])
def test_a_hold_that_no_spare_could_end_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="hold without swap"):
        parse_rules(text)


@pytest.mark.parametrize(
    "text", ["goodput", "goodput=fast", "speed=1", "cost=-1", "cost=nan", "cost=inf", "cost=1,cost=2"]
)
def test_weights_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be a weight"):
        parse_weights(text)


def test_words_are_read_whatever_their_case_and_spaces() -> None:
    assert parse_rules(" Swap, WAIT,stop ,") == Rules(order=(Rung.SWAP, Rung.WAIT, Rung.STOP))
    assert parse_rules("cheapest") == parse_rules("") == Rules()


@pytest.mark.parametrize(
    "text", ["swap,acquire-wait,hold", "swap,acquire-train", "swap,acquire,stop", "no-restart,no-move", "cheapest"]
)
def test_the_policy_in_force_is_shown_as_it_was_given(text: str) -> None:
    shown = str(ActivePolicy(parse_rules(text)))
    assert shown.split()[:2] == ["--policy", text]


@pytest.mark.parametrize(
    ("decision", "because"),
    [
        (Decision(rung=Rung.RESTART), "restart is impossible: no checkpoint is on disk"),
        (Decision(rung=Rung.SHRINK), "shrink is impossible: the number of ranks is fixed (--min-ranks 0)"),
        (Decision(rung=Rung.SWAP, targets={Rank(7): SlotId("tray-3/3")}), "its targets are not those of the view"),
        (Decision(rung=Rung.STOP, deadline_s=-1.0), "a deadline of -1.0 s"),
        (Decision(rung=Rung.HOLD), "hold is impossible: there is nothing to wait for"),
        (Decision(rung=Rung.SWAP), ""),
        (Decision(rung=Rung.SWAP, targets={Rank(7): SlotId("tray-9/0")}), ""),
    ],
)
def test_what_a_user_asks_for_is_held_against_what_is_possible(decision: Decision, because: str) -> None:
    said = refusal(decision, *situation("1 lost, 1 ready"))
    assert said.startswith(because) if because else not said


def test_the_example_in_the_docstring_is_what_happens() -> None:
    assert doctest.testmod(rackrun.policy).failed == 0


def test_a_job_can_always_stop() -> None:
    with pytest.raises(UsageError, match="must be able to stop"):
        parse_rules("no-stop")


def test_whose_is_the_former_name_of_a_failures_cause() -> None:
    with pytest.warns(DeprecationWarning, match="it is called FailureCause now") as warned:
        former = rackrun.policy.Whose  # type: ignore[attr-defined]
    assert former is FailureCause
    assert warned[0].filename == __file__
