"""Oracle: at its end every rank's script reached the same untracked values as without faults.

Such values are averages, counters, copies, and whatever `run.track` was not given. A process that takes over runs the
script from its beginning: untracked values are as they were built there, and neither a loss nor a weight need show it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

import msgspec

from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace, Verdict
from rackrun.chaos.inprocess.state_recorder import EndState

__all__ = ["UntrackedValue", "differences", "judge", "remedy_for"]

NAMED_MAX = 4


class UntrackedValue(msgspec.Struct, frozen=True):
    """One untracked value that differs."""

    name: str
    rank: int
    since: int
    """The first step of the process that holds this rank at the end."""
    mine: str
    theirs: str
    """The value in what it is compared with; "" if it does not exist there."""
    where: str = "without faults"

    def __str__(self) -> str:
        newcomer = f", another process since step {self.since}," if self.since > 0 else ""
        return f"{self.name} on rank {self.rank}{newcomer} is {self.mine or 'not there'}, and {self.theirs or 'not there'} {self.where}"


def judge(evidence: RunEvidence) -> Verdict:
    """Judge whether any untracked value differs at the end."""
    if evidence.plan.expect == "stops":
        return Verdict(holds=True, because="it was to stop: there are none")
    mine, theirs = evidence.trace.ends, evidence.reference.ends
    if not theirs:
        return Verdict(holds=None, because="nobody has looked at what the run without faults reached")
    if not mine:
        return Verdict(holds=None, because="no rank came to its end")
    found = differences(evidence)
    if not found:
        counted = sum(len(end.reached) for end in mine.values())
        return Verdict(holds=True, because=f"{counted} values on {len(mine)} ranks")
    first = {one.name: one for one in reversed(found)}
    names = list(dict.fromkeys(one.name for one in found))
    told = [str(first[name]) for name in names[:NAMED_MAX]]
    more = [f"and {len(names) - NAMED_MAX} more"] * (len(names) > NAMED_MAX)
    return Verdict(holds=False, because="not tracked: " + "; ".join([*told, *more]))


def differences(evidence: RunEvidence) -> list[UntrackedValue]:
    """Return the untracked values that differ, those of newcomers first.

    Where there are two runs without faults, what differs between these is left out.
    """
    theirs, ends = evidence.reference.ends, evidence.trace.ends
    noise = _noise(evidence.reference, evidence.again)
    alike = _alike(theirs)
    found: list[UntrackedValue] = []
    for rank, end in sorted(ends.items()):
        other = theirs.get(rank)
        if other is not None and other.world == end.world and _never_resized(evidence.trace):
            found += [
                UntrackedValue(name, rank, end.since, mine, their)
                for name, mine, their in _unlike(end.reached, other.reached)
            ]
            continue
        # Ranks have changed places and may have had more to do, so a newcomer is compared with the oldest process, in
        # the values that were alike on all ranks without faults.
        oldest = min(ends.values(), key=lambda end: (end.since, end.rank))
        found += [
            UntrackedValue(name, rank, end.since, mine, their, f"on rank {oldest.rank}")
            for name, mine, their in _unlike(end.reached, oldest.reached)
            if end.since > oldest.since and name in alike
        ]
    entries = [one for one in found if one.name not in noise and not _may_differ(one.name, evidence.may_differ)]
    return sorted(entries, key=lambda one: (one.since <= 0, one.rank))


def remedy_for(found: list[UntrackedValue]) -> str:
    """Return what to do about untracked values that differ, naming the first."""
    name = found[0].name
    owner = name.partition(".")[0].partition("[")[0]
    keep = (
        f"run.track({owner}={owner})"
        if owner.isidentifier() and owner != name
        else "run.track of an object that holds it"
    )
    return (
        f"{keep}; an object of your own class needs state_dict and load_state_dict that cover all of its state, or its values belong into buffers of a tracked module. "
        f"If it goes into no training (a list for a plot, a cache), say so: --may-differ {owner}, or may_differ=[...] of the fixture."
    )


# -- helpers
def _unlike(mine: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the values that differ, as (name, mine, theirs).

    A variable that is not bound on one side cannot be read there, so it counts as no difference.
    """
    bound = {_variable(name) for name in mine} & {_variable(name) for name in theirs}
    for name in dict.fromkeys([*theirs, *mine]):
        if mine.get(name) != theirs.get(name) and _variable(name) in bound:
            yield name, mine.get(name, ""), theirs.get(name, "")


def _variable(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _noise(reference: Trace, again: Trace | None) -> set[str]:
    """Return the names of values that differ between two runs without faults."""
    if again is None:
        return set()
    pairs = [(end, again.ends[rank]) for rank, end in reference.ends.items() if rank in again.ends]
    return {name for one, other in pairs for name, _, _ in _unlike(one.reached, other.reached)}


def _alike(ends: dict[int, EndState]) -> set[str]:
    """Return the names of values that all ranks of a run have, and have alike."""
    first, *others = [end.reached for end in ends.values()]
    return {name for name, value in first.items() if all(other.get(name) == value for other in others)}


def _never_resized(trace: Trace) -> bool:
    return len({plan.world_size for plan in trace.plans}) <= 1


def _may_differ(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name matches one of the patterns, or is part of a value that does."""
    return any(
        fnmatch.fnmatchcase(name, pattern) or name == pattern or name.startswith((f"{pattern}.", f"{pattern}["))
        for pattern in patterns
    )
