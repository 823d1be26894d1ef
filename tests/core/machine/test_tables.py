"""Every event, timer and fact has exactly one place that acts on it."""

from __future__ import annotations

from typing import get_args

from rackrun.core.generation.facts import Fact
from rackrun.core.machine.apply import APPLY, APPLY_OF_WORKER
from rackrun.core.machine.rules import REACTIONS, RULES
from rackrun.core.machine.timers import TIMERS
from rackrun.protocol.events import JobEvent, WorkerEvent
from rackrun.protocol.timers import Timer


def test_every_event_is_applied_by_one_function() -> None:
    assert APPLY.keys() == set(get_args(JobEvent))
    assert APPLY_OF_WORKER.keys() == set(get_args(WorkerEvent))


def test_every_timer_has_one_function_for_its_end() -> None:
    assert TIMERS.keys() == set(get_args(Timer))


def test_a_rule_has_one_name_in_all_tables() -> None:
    """A command's cause is the name alone."""
    kinds = (*APPLY, *APPLY_OF_WORKER, *TIMERS, *REACTIONS)
    names = [*(kind.__name__ for kind in kinds), *(name for name, _, _ in RULES)]
    assert len(names) == len(set(names))


def test_every_fact_has_one_function_that_acts_on_it() -> None:
    assert REACTIONS.keys() == set(get_args(Fact))
