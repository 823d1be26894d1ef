"""Where a worker stands between two generations, what is known of its newest unit, and the transitions of both."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

__all__ = [
    "INTACT",
    "MEMBERSHIP_TRANSITIONS",
    "UNIT_TRANSITIONS",
    "MembershipState",
    "MembershipTrigger",
    "UnitState",
    "UnitTrigger",
]


class MembershipState(StrEnum):
    """Where a worker stands between two generations."""

    WAITING = "waiting"
    """It is in no generation, and none is announced: at the start, or as a spare."""
    CALLED = "called"
    """A plan has come, and no generation of this worker was broken before: as a spare, or when ``main`` is left."""
    WHOLE = "whole"
    """It is in the newest generation that it knows."""
    FAILED = "failed"
    """A collective of its generation has failed, and no newer generation is announced yet."""
    BROKEN = "broken"
    """A newer generation is announced, and its plan has not come: this worker has reported what it holds."""
    PLANNED = "planned"
    """The plan of the newest generation has come, after a break."""


class MembershipTrigger(StrEnum):
    """What moves a worker from one state to another."""

    START = "start"
    """It begins without a coordinator."""
    FAIL = "fail"
    BREAK = "break"
    PLAN = "plan"
    JOIN = "join"
    LEAVE = "leave"
    """It leaves ``main`` as a newcomer, which is in no generation."""
    REENTER = "reenter"
    """It leaves ``main`` with a committed position that stays: the plan cuts all shards anew."""


MEMBERSHIP_TRANSITIONS: Mapping[MembershipState, Mapping[MembershipTrigger, MembershipState]] = {
    MembershipState.WAITING: {
        MembershipTrigger.START: MembershipState.WHOLE,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.CALLED,
    },
    MembershipState.CALLED: {
        MembershipTrigger.FAIL: MembershipState.PLANNED,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.CALLED,
        MembershipTrigger.JOIN: MembershipState.WHOLE,
        MembershipTrigger.LEAVE: MembershipState.CALLED,
        MembershipTrigger.REENTER: MembershipState.PLANNED,
    },
    MembershipState.WHOLE: {
        MembershipTrigger.FAIL: MembershipState.FAILED,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.CALLED,
    },
    MembershipState.FAILED: {
        MembershipTrigger.FAIL: MembershipState.FAILED,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.PLANNED,
    },
    MembershipState.BROKEN: {
        MembershipTrigger.FAIL: MembershipState.BROKEN,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.PLANNED,
    },
    MembershipState.PLANNED: {
        MembershipTrigger.FAIL: MembershipState.PLANNED,
        MembershipTrigger.BREAK: MembershipState.BROKEN,
        MembershipTrigger.PLAN: MembershipState.PLANNED,
        MembershipTrigger.JOIN: MembershipState.WHOLE,
        MembershipTrigger.LEAVE: MembershipState.CALLED,
        MembershipTrigger.REENTER: MembershipState.PLANNED,
    },
}
"""The transition table of a worker. The coordinator sends no plan to a whole generation, it breaks it first. If a plan
came all the same, the worker would go on in its generation until that breaks."""
INTACT = frozenset({MembershipState.WAITING, MembershipState.CALLED, MembershipState.WHOLE})
"""The states in which nothing of this worker's generation is broken."""


class UnitState(StrEnum):
    """What is known of the newest unit."""

    OPEN = "open"
    """Its gate is not entered, or the unit is to be done again."""
    ENTERED = "entered"
    """Its gate is entered; the sums or a plan will say whether it counts."""
    COUNTED = "counted"
    """It counts, and cannot be undone."""


class UnitTrigger(StrEnum):
    """What moves a unit (a step or phase) from one state to another."""

    ENTER = "enter"
    PASS = "pass"  # noqa: S105 - no password
    REFUSE = "refuse"
    """All ranks conclude from the sums that the unit is to be done again."""
    COUNT = "count"
    """A plan says that the unit is committed."""
    DISCARD = "discard"
    """A plan says that the unit is not committed."""
    PLACE = "place"
    """The committed position is set, and what was known of a unit is forgotten."""


UNIT_TRANSITIONS: Mapping[UnitState, Mapping[UnitTrigger, UnitState]] = {
    UnitState.OPEN: {
        UnitTrigger.ENTER: UnitState.ENTERED,
        UnitTrigger.PLACE: UnitState.OPEN,
    },
    UnitState.ENTERED: {
        UnitTrigger.ENTER: UnitState.ENTERED,
        UnitTrigger.PASS: UnitState.COUNTED,
        UnitTrigger.REFUSE: UnitState.OPEN,
        UnitTrigger.COUNT: UnitState.COUNTED,
        UnitTrigger.DISCARD: UnitState.OPEN,
        UnitTrigger.PLACE: UnitState.OPEN,
    },
    UnitState.COUNTED: {
        UnitTrigger.ENTER: UnitState.ENTERED,
        UnitTrigger.PASS: UnitState.COUNTED,
        UnitTrigger.PLACE: UnitState.OPEN,
    },
}
"""The transition table of a unit. A unit that a plan has discarded cannot pass: the worker would contradict the
others."""
