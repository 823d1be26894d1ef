"""Detection of deadlocks: ranks that all wait in collectives for each other, so that none can ever go on.

Each rank reports in which collective of which group it is blocked, as the *n*-th that it has called there, and how many
it has called in each of its groups (`rackrun.protocol.events.CollectiveWait`). A collective ends only when all members
of the group have called it. It is a deadlock if in the group of every rank some member has called fewer.

The reports need not be from one moment. Suppose that some ranks have left the collectives in which they were reported,
and let r be the first that did. Then the member m that had called too few has since called the collective that r waited
for, before r left it. Counts only grow, so m's report is older than this call. But m was blocked when it reported, so
it must have left its collective before r did, and r is not the first. So a set of reports that contains an outdated one
never shows a deadlock.

Ranks that wait in one collective that all have entered are not deadlocked: the transport may still complete it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rackrun.protocol.events import CollectiveWait
from rackrun.protocol.ids import Rank

__all__ = ["is_deadlock"]


def is_deadlock(waits: Mapping[Rank, CollectiveWait]) -> bool:
    """Return whether these ranks wait for each other.

    ``waits`` holds reports of ranks of one generation. To show that all ranks stand, it must hold all of them. What
    other ranks do does not change the result.
    """
    fewest: dict[int, int] = {}
    for wait in waits.values():
        for group, count in wait.called:
            fewest[group] = min(count, fewest.get(group, count))
    return bool(waits) and all(fewest.get(wait.group, wait.number) < wait.number for wait in waits.values())
