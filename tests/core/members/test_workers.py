"""The table of a worker's states: what is not in it raises, with the worker's story."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from rackrun.core.members.workers import TRANSITIONS, Trigger, WorkerRecord, WorkerState, why_exited
from rackrun.errors import InvalidTransition
from rackrun.protocol.commands import Worker
from rackrun.protocol.events import ScriptFailure, WorkerExited
from rackrun.protocol.ids import Incarnation, SlotId


def record(state: WorkerState = WorkerState.STARTING) -> WorkerRecord:
    return WorkerRecord(Worker(SlotId("a/0"), Incarnation(7)), None, state)


@pytest.mark.parametrize(("state", "trigger"), list(product(WorkerState, Trigger)), ids=lambda value: value.value)
def test_every_pair_is_in_the_table_or_raises_and_then_changes_nothing(state: WorkerState, trigger: Trigger) -> None:
    worker = record(state)
    if trigger in TRANSITIONS[state]:
        worker.move(trigger)
        assert worker.state is TRANSITIONS[state][trigger]
    else:
        with pytest.raises(InvalidTransition):
            worker.move(trigger)
        assert (worker.state, worker.story) == (state, ["starting"])


def test_the_table_is_complete_and_every_state_can_be_reached() -> None:
    assert list(TRANSITIONS) == list(WorkerState)
    reached = {state for targets in TRANSITIONS.values() for state in targets.values()}
    assert reached == set(WorkerState) - {WorkerState.STARTING}


def test_every_life_ends() -> None:
    for state, targets in TRANSITIONS.items():
        assert state is WorkerState.EXITED or targets[Trigger.EXIT] is WorkerState.EXITED


def test_an_invalid_transition_tells_the_story() -> None:
    worker = record()
    worker.move(Trigger.READY)
    worker.move(Trigger.FENCE, "silent for 700 ms")
    with pytest.raises(InvalidTransition, match="a/0 incarnation 7 is fenced and cannot parked") as caught:
        worker.move(Trigger.PARKED)
    assert caught.value.story == ("starting", "ready", "fence (silent for 700 ms)")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"signal": 9}, "SIGKILL"),
        ({"signal": 35}, "signal 35"),
        ({"exit_code": -11}, "SIGSEGV"),
        ({"exit_code": 3}, "exit code 3"),
        ({}, "gone"),
    ],
)
def test_how_a_process_ended_in_words(fields: dict[str, Any], words: str) -> None:
    assert why_exited(WorkerExited(slot=SlotId("a/0"), incarnation=Incarnation(1), **fields)) == words


def test_an_exception_is_told_by_its_type_and_place() -> None:
    failure = ScriptFailure(type="builtins.ValueError", message="no", traceback="", where="train.py:7")
    event = WorkerExited(slot=SlotId("a/0"), incarnation=Incarnation(1), exit_code=1, failure=failure)
    assert why_exited(event) == "builtins.ValueError at train.py:7"
