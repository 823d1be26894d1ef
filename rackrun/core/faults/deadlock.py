"""Whether ranks that all wait in collectives wait for each other, so that none of them can ever go on.

Each says in which collective of which group it is blocked, as the *n*-th that it has called there, and how many it has called in each of its
groups (`rackrun.protocol.events.CollectiveWait`). Its collective ends only when all members of the group have called theirs. It is a deadlock
if in the group of every rank some member has called fewer.

The reports need not be of one moment. Suppose that some ranks have left the collectives in which they were reported, and let r be the first that
did. Then the member m that had called too few has called the one that r waited for before that. Counts only grow, so m's report is older
than this call. But m was blocked when it reported: it must have left its collective before r did, and r is not the first. So reports
of which one is out of date never show a deadlock.

Ranks that wait in one collective that all have entered are none: the transport may yet bring it to its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from rackrun.protocol.events import CollectiveWait
from rackrun.protocol.ids import Rank

__all__ = ["is_deadlock"]


def is_deadlock(waits: Mapping[Rank, CollectiveWait]) -> bool:
    """``waits``: of ranks of one generation; all of them, if all are to be known to stand. What other ranks do changes nothing."""
    fewest: dict[int, int] = {}
    for wait in waits.values():
        for group, count in wait.called:
            fewest[group] = min(count, fewest.get(group, count))
    return bool(waits) and all(fewest.get(wait.group, wait.number) < wait.number for wait in waits.values())
