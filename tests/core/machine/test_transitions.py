"""The tables of a pause, of a request and of a window of stalls, and events that come late, twice or unasked for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import pytest

from rackrun.core.faults.stall_window import WINDOW_TRANSITIONS, StallWindow, WindowState, WindowTrigger
from rackrun.core.generation.world_pause import PAUSE_TRANSITIONS, PauseState, PauseTrigger, WorldPause
from rackrun.core.members.transitions import STORY_MAX
from rackrun.core.requests.pending_requests import REQUEST_TRANSITIONS, PendingGrow, RequestState, RequestTrigger
from rackrun.core.resize.rented_rack import RackStage, RentedRack
from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import Answer, BreakGeneration, Command, PauseWorkers, SetTimer
from rackrun.protocol.events import CollectiveWait, TimerFired, TrayLost
from rackrun.protocol.ids import TrayId
from rackrun.protocol.timers import CopiesOver, LateStallsGathered, PauseOver
from tests.core.core_harness import CoreHarness, every, only
from tests.core.faults.test_deadlock import WORLD, says, wait
from tests.core.requests.test_control import Asked, job

TABLES: list[tuple[Callable[[], Any], Mapping[Any, Mapping[Any, Any]], type[StrEnum], type[StrEnum]]] = [
    (WorldPause, PAUSE_TRANSITIONS, PauseState, PauseTrigger),
    (lambda: PendingGrow("7", 4), REQUEST_TRANSITIONS, RequestState, RequestTrigger),
    (StallWindow, WINDOW_TRANSITIONS, WindowState, WindowTrigger),
]
PAIRS = [
    pytest.param(make, table, state, trigger, id=f"{states.__name__} {state.value} {trigger.value}")
    for make, table, states, triggers in TABLES
    for state in states
    for trigger in triggers
]


@pytest.mark.parametrize(("make", "table", "state", "trigger"), PAIRS)
def test_every_pair_is_in_the_table_or_raises_and_then_changes_nothing(
    make: Callable[[], Any], table: Mapping[Any, Mapping[Any, Any]], state: StrEnum, trigger: StrEnum
) -> None:
    machine = make()
    machine.state = state
    if trigger in table[state]:
        machine.move(trigger)
        assert machine.state is table[state][trigger]
    else:
        before = pickle.dumps(machine)
        with pytest.raises(InvalidTransition, match=f"is {state} and cannot {trigger} "):
            machine.move(trigger)
        assert pickle.dumps(machine) == before


@pytest.mark.parametrize(
    ("table", "states", "triggers"), [row[1:] for row in TABLES], ids=[row[2].__name__ for row in TABLES]
)
def test_a_table_is_complete_and_every_state_can_be_reached_and_every_trigger_leads_somewhere(
    table: Mapping[Any, Mapping[Any, Any]], states: type[StrEnum], triggers: type[StrEnum]
) -> None:
    assert list(table) == list(states)
    first = next(iter(states))
    assert {first, *(state for targets in table.values() for state in targets.values())} == set(states)
    assert {trigger for targets in table.values() for trigger in targets} == set(triggers)


def test_a_request_that_is_answered_for_the_last_time_twice_tells_its_story() -> None:
    one = PendingGrow("7", 4)
    one.move(RequestTrigger.BEGIN)
    one.move(RequestTrigger.FINISH)
    with pytest.raises(InvalidTransition, match="grow to 4 ranks is done and cannot call off") as caught:
        one.move(RequestTrigger.CALL_OFF)
    assert caught.value.story == ("asked", "begin", "finish")


def test_a_rack_tells_its_story_too() -> None:
    one = RentedRack(request=3, trays=1, asked_ms=0, until_ms=9, there=(), failed=0)
    one.enter(RackStage.DELIVERED)
    with pytest.raises(InvalidTransition, match=r"rack 3 is delivered and cannot become leaving \(asked > delivered\)"):
        one.enter(RackStage.LEAVING)


def test_a_story_is_bounded() -> None:
    pause = WorldPause()
    for _ in range(STORY_MAX):
        pause.move(PauseTrigger.BEGIN)
        pause.move(PauseTrigger.END)
    with pytest.raises(InvalidTransition) as caught:
        pause.move(PauseTrigger.END)
    assert len(caught.value.story) == STORY_MAX


# -- the pause -------------------------------------------------------------------------------------------------------
def changes_nothing(harness: CoreHarness, act: Callable[[], Sequence[Command]]) -> bool:
    """Whether the core answers nothing, and its world, its stalls and its requests stay as they are."""
    parts = harness.core._job
    remembered = (parts.world, parts.recovery.stalls.window, parts.operator_requests.under_way)
    before = pickle.dumps(remembered)
    return not act() and pickle.dumps(remembered) == before


@pytest.fixture
def pausing() -> Asked:
    """Ranks 0 to 5 were told to pause, since b is drained."""
    four = job()
    assert every(PauseWorkers, four.drain("b"))
    return four


def test_a_rank_that_pauses_unasked_is_ignored(training: CoreHarness) -> None:
    assert changes_nothing(training, training.pause_all)
    assert changes_nothing(training, lambda: training.timer("pause"))


def test_a_rank_that_says_twice_that_it_has_paused_counts_once(pausing: Asked) -> None:
    pausing.pauses("a/0")
    assert changes_nothing(pausing, lambda: pausing.pauses("a/0"))
    assert not [one for slot in pausing.members[1:-1] for one in pausing.pauses(slot)]
    assert every(BreakGeneration, pausing.pauses(pausing.members[-1]))


def test_what_comes_of_a_pause_that_is_over_is_ignored(pausing: Asked) -> None:
    of = pausing.core._job.world.generation
    pausing.pause_all()
    assert changes_nothing(pausing, pausing.pause_all)
    assert changes_nothing(pausing, lambda: pausing.tell(TimerFired(timer=PauseOver(of))))
    assert changes_nothing(pausing, lambda: pausing.timer("pause"))


def test_a_pause_that_a_loss_ends_is_over_for_those_that_say_later_that_they_have_paused(pausing: Asked) -> None:
    pausing.pauses("a/0")
    pausing.exits("c/1")
    assert pausing.core._job.world.pause.state is PauseState.NONE
    assert changes_nothing(pausing, pausing.pause_all)
    assert changes_nothing(pausing, lambda: pausing.timer("pause"))


@pytest.mark.parametrize("ended", [False, True])
def test_a_pause_that_comes_too_late_changes_nothing_and_ends_with_the_job(pausing: Asked, ended: bool) -> None:
    first, *others = pausing.members
    pausing.finishes(first)
    for slot in others if ended else []:
        pausing.finishes(slot)
    assert pausing.view.phase == ("ending" if ended else "training")
    assert changes_nothing(pausing, lambda: pausing.timer("pause"))
    assert changes_nothing(pausing, lambda: pausing.timer("pause"))
    assert pausing.core._job.world.pause.state is (PauseState.NONE if ended else PauseState.PAUSING)


# -- requests --------------------------------------------------------------------------------------------------------
def test_a_drain_is_looked_at_again_when_a_loss_interrupts_it_and_is_done_once() -> None:
    five = job("abcde", spares=4)
    five.drain("b")
    (one,) = five.core._job.operator_requests.under_way
    states = [one.state]
    five.pause_all()
    five.park_all(passed=7)
    five.exits("b/0")
    five.resume_all()
    states.append(one.state)  # b/1 has not exited
    five.exits("c/0")
    states.append(one.state)
    five.park_all(passed=8)
    assert not every(Answer, five.resume_all())
    states.append(one.state)
    assert only(Answer, five.exits("b/1")).outcome == "done"
    assert [*states, one.state] == ["begun", "empty", "begun", "empty", "done"]


@pytest.mark.parametrize("request_name", ["1", "2", "unknown"])
def test_a_timer_of_copies_may_fire_at_any_time_and_twice(pausing: Asked, request_name: str) -> None:
    for act in (pausing.pause_all, pausing.park_all, pausing.resume_all, lambda: pausing.exits("b/0")):
        for _ in range(2):
            pausing.tell(TimerFired(timer=CopiesOver(request_name)))
        act()
    assert only(Answer, pausing.exits("b/1")).outcome == "done"
    assert changes_nothing(pausing, lambda: pausing.tell(TimerFired(timer=CopiesOver(request_name))))


@pytest.mark.parametrize("empty", [False, True])
def test_a_tray_that_departs_and_is_lost_twice_is_answered_once(empty: bool) -> None:
    four = job()
    four.leaves("d" if empty else "b")
    tray = TrayId("d" if empty else "b")
    lost = [one for _ in range(2) for one in four.tell(TrayLost(tray=tray, because="it has left"))]
    assert [answer.outcome for answer in every(Answer, lost)] == ["done"]


# -- stalls ----------------------------------------------------------------------------------------------------------
def test_the_end_of_a_window_without_reports_means_nothing(training: CoreHarness) -> None:
    for kind in ("stalled", "judge", "judge", "stalled"):
        assert changes_nothing(training, partial(training.timer, kind))
    training.stalls("a/0", 11, waiting=True)
    training.stalls("a/0", 11, over=True)
    for kind in ("stalled", "judge"):
        assert changes_nothing(training, partial(training.timer, kind))


@pytest.mark.parametrize("kind", ["stalled", "judge"])
def test_a_timer_of_an_earlier_window_may_expire_in_any_other(training: CoreHarness, kind: str) -> None:
    window = training.core._job.recovery.stalls.window
    acts: list[Callable[[], object]] = [
        lambda: training.stalls("a/0", 11, waiting=True),
        lambda: training.timer("stalled"),
        lambda: training.timer("judge"),
        lambda: training.stalls("a/0", 12, waiting=True),
        lambda: training.stalls("a/0", 12, over=True),
        lambda: training.stalls("a/1", 12, waiting=True),
    ]
    for act in acts:
        act()
        for _ in range(2):
            training.timer(kind)
    assert window.state is (WindowState.GATHERED if kind == "stalled" else WindowState.DUE)


def test_a_rank_that_is_alone_and_says_again_that_it_stalls_begins_the_first_wait_again(training: CoreHarness) -> None:
    window = training.core._job.recovery.stalls.window
    for _ in range(2):
        assert every(SetTimer, training.stalls("a/0", 11, waiting=True))
        assert isinstance(only(SetTimer, training.timer("stalled")).timer, LateStallsGathered)
        states = [window.state]
        training.timer("judge")
        assert [*states, window.state] == ["gathered", "due"]


def test_ranks_that_no_longer_wait_for_each_other_are_not_said_to(training: CoreHarness) -> None:
    training.exits("a/1", signal=9)
    training.park_all(passed=4)
    apart: dict[int, CollectiveWait] = {
        1: wait(1, "ranks 0, 1", {WORLD: 3, "ranks 0, 1": 2}),
        **{rank: wait(rank, WORLD, {WORLD: 4, "ranks 0, 1": 1, "ranks 2, 3": 1}) for rank in (0, 2, 3)},
    }
    for rank, blocked in apart.items():
        says(training, rank, blocked)
    assert training.core._job.recovery.stalls.window.state is WindowState.DEADLOCK
    training.resume_all()
    assert training.view.phase == "training"
    training.stalls(training.view.ranks[1].slot, 10)
    training.timer("stalled")
    broken = only(BreakGeneration, training.timer("judge"))
    assert "(1 of 4 ranks report)" in broken.because
