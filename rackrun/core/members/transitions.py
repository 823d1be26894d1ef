"""Transition tables: which state may follow which, and the error for any other.

Every state machine of the core has a table. `docs/state_machines.md` is drawn from them by `tools/state_machines.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from rackrun.errors import InvalidTransition

__all__ = ["STORY_MAX", "check_transition"]

STORY_MAX = 32
"""Number of transitions that a state machine's story keeps: enough to explain an invalid one, and bounded in a run of
months."""

S = TypeVar("S", bound=Enum)


def check_transition(
    what: str, now: S, following: S, table: Mapping[S, Collection[S]], story: Sequence[str] = ()
) -> None:
    """Raise `InvalidTransition` if ``table`` does not lead from ``now`` to ``following``."""
    if following not in table[now]:
        raise InvalidTransition(what, now.value, f"become {following.value}", story)
