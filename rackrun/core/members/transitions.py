"""Transition tables: which state may follow which, and the error for any other.

Every state machine of the core has a table. `docs/state_machines.md` is drawn from them by `tools/state_machines.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from enum import Enum, StrEnum
from typing import TypeVar

from rackrun.errors import InvalidTransition

__all__ = ["STORY_MAX", "check_transition", "next_state"]

STORY_MAX = 32
"""Number of transitions that a state machine's story keeps: enough to explain an invalid one, and bounded in a run of
months."""

S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=StrEnum)


def check_transition(what: str, now: S, following: S, table: Mapping[S, Collection[S]], story: Iterable[str]) -> None:
    """Raise `InvalidTransition` if ``table`` does not lead from ``now`` to ``following``."""
    if following not in table[now]:
        raise InvalidTransition(what, now.value, f"become {following.value}", story)


def next_state(what: object, now: S, trigger: T, table: Mapping[S, Mapping[T, S]], story: deque[str]) -> S:
    """Return the state to which ``trigger`` leads from ``now``, and add the trigger to ``story``.

    Raises `InvalidTransition`, and changes nothing, if ``table`` has no such transition.
    """
    following = table[now].get(trigger)
    if following is None:
        raise InvalidTransition(str(what), now.value, trigger.value, story)
    story.append(trigger.value)
    return following
