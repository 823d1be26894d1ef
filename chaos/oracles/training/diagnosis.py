"""Find the first difference between two runs, and what it says about the script.

Everything is compared in the order of training: the state of the ranks before step 0, the loss and the samples of step
0, the state before step 1, and so on. Untracked state is never by itself a failure; it is named as a possible cause
where something else differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace, gate_of
from rackrun.chaos.inprocess.state_recorder import StepState
from rackrun.chaos.oracles.training.untracked import differences, remedy_for

__all__ = ["Diagnosis", "RunDifference", "first_difference", "judge_script", "judge_untracked"]

NAMED_MAX = 6


class Entry(msgspec.Struct, frozen=True):
    """One value that differs."""

    rank: int
    name: str
    mine: str
    theirs: str
    """The value in the run that it is compared with; "" if it does not exist there."""
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}: {self.mine or 'not there'}, and {self.theirs or 'not there'} without faults"


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The first difference between two runs."""

    step: int
    where: str
    """Where it is. ``before``: in the state of the ranks before the step; ``loss``, ``samples``: in those of the step;
    ``world``: in the number of ranks."""
    what: str
    entries: tuple[Entry, ...] = ()
    """The tracked values that differ."""
    equal: int | None = None
    """How many tracked values are equal on all ranks before the step (for ``before``: before the previous step).

    None if the state was not recorded.
    """
    reached: tuple[Entry, ...] = ()
    """The untracked values that differ before the step."""
    taken_over: tuple[tuple[int, int], ...] = ()
    """(step, rank) for each process that took over a rank, with its first step, up to the difference."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, in plain words."""

    kind: str
    """One of ``not repeatable``, ``untracked``, ``built otherwise``, ``world``, ``unknown``."""
    step: int
    what: str
    facts: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {fact}" for fact in self.facts), f"Remedy: {self.remedy}"])


def judge_script(reference: Trace, trace: Trace, again: Trace | None) -> Diagnosis | None:
    """Return why ``trace`` differs from ``reference``, or None if no difference can be seen.

    ``again`` is a second run without faults, if there is one.
    """
    if again is not None and (found := first_difference(reference, again)) is not None:
        return _not_repeatable(found)
    found = first_difference(reference, trace, noise=_noise(reference, again))
    if found is None or _only_rounded(found, trace):
        return None
    if found.where == "world":
        return Diagnosis(
            kind="world",
            step=found.step,
            what=f"the run with faults is another training: {found.what}.",
            facts=("sums over another number of ranks are rounded otherwise",),
            remedy='what a step computes and reads may not depend on run.world_size or run.rank; with that, reduction="exact" gives the same bits on any '
            "number of ranks. Or have a spare for every rank that the plan takes away."
            if trace.exact
            else 'have a spare for every rank that the plan takes away, or use reduction="exact" in @rackrun.elastic.',
        )
    facts = _facts(found)
    if found.reached:
        return _untracked(found, facts, _constant(reference, found.reached))
    seen = "nothing that the step function reaches by name differs" if found.equal is not None else ""
    return Diagnosis(
        kind="unknown",
        step=found.step,
        what=f"the run with faults is not the run without: {found.what}.",
        facts=(*facts, seen) if seen else facts,
        remedy="look at what the step reads besides tracked state and run.loader: files, caches, generators that are half consumed, the process "
        "itself. If there is nothing, it is a bug of rackrun: please report it with this folder."
        if found.equal is not None
        else "run it step by step (--step-by-step), which says what differs.",
    )


def judge_untracked(evidence: RunEvidence) -> Diagnosis | None:
    """Return what a process that took over did not get, where no compared value shows it yet; None if there is
    nothing."""
    found = differences(evidence)
    if not found:
        return None
    names = list(dict.fromkeys(one.name for one in found))
    newcomer = next((one for one in found if one.since > 0), None)
    who = (
        f"the process that took over as rank {newcomer.rank} did not get it"
        if newcomer
        else "where a step was done again it was not put back"
    )
    return Diagnosis(
        kind="untracked",
        step=max(found[0].since, 0),
        what=f"the losses and all that is tracked are the same, but {_some(names)}, which the script reaches, {'is' if len(names) == 1 else 'are'} not tracked: {who}.",
        facts=(
            *(f"not tracked: {one}" for one in found[:NAMED_MAX]),
            *([f"not tracked: and {len(found) - NAMED_MAX} more"] * (len(found) > NAMED_MAX)),
        ),
        remedy=remedy_for(found),
    )


def _only_rounded(found: RunDifference, trace: Trace) -> bool:
    """Whether the difference follows from another number of ranks, with which the same bits are not promised."""
    return trace.exact is False and trace.resized is not None and found.step >= trace.resized[0]


def first_difference(reference: Trace, trace: Trace, noise: frozenset[str] = frozenset()) -> RunDifference | None:
    """Return the first difference between two runs, or None. ``noise``: names of untracked values to ignore."""
    both = _Both(reference, trace, noise)
    for step in both.steps:
        if (found := both.before(step) or both.inside(step)) is not None:
            return found
    return None


class _Both:
    """Two runs, compared step by step."""

    def __init__(self, reference: Trace, trace: Trace, noise: frozenset[str]) -> None:
        self._reference, self._trace, self._noise = reference, trace, noise
        self._theirs = {(held.step, held.rank): held for held in reference.witness}
        self._mine: dict[int, list[StepState]] = {}
        for held in trace.witness:
            self._mine.setdefault(held.step, []).append(held)
        self._gates = sorted(reference.gates.keys() & trace.gates.keys())
        self.steps = sorted(self._mine.keys() | {step for step, _ in self._gates})

    def before(self, step: int) -> RunDifference | None:
        """Return the difference in the tracked state before ``step``, or None."""
        entries = tuple(self._unlike(step, "tracked"))
        if not entries:
            return None
        names = list(dict.fromkeys(entry.name for entry in entries))
        what = f"before step {step}, {_some(names)} differ{'s' if len(names) == 1 else ''}"
        reached = self._unlike(step - 1, "reached") or self._unlike(step, "reached")
        return RunDifference(
            step, "before", what, entries, self._equal(step - 1), tuple(reached), self._taken_over(step)
        )

    def inside(self, step: int) -> RunDifference | None:
        """Return the difference in what the world agreed on in ``step``, or None."""
        for at in self._gates:
            mine, theirs = self._trace.gates[at], self._reference.gates[at]
            if at[0] != step or mine == theirs:
                continue
            if (shrunk := self._another_world(step)) is not None:
                return RunDifference(step, "world", f"{shrunk}, and step {step} is the first that differs")
            phase = f" (phase {at[1]})" if at[1] else ""
            where, what = "loss", f"is {gate_of(mine).loss!r} instead of {gate_of(theirs).loss!r}"
            if mine[8:] != theirs[8:]:
                where, what = "samples", "counts other samples"
            told = f"the loss of step {step}{phase} {what}" if where == "loss" else f"step {step}{phase} {what}"
            reached = tuple(self._unlike(step, "reached"))
            return RunDifference(step, where, told, (), self._equal(step), reached, self._taken_over(step))
        return None

    def _another_world(self, step: int) -> str | None:
        """Return how the number of ranks in ``step`` differs from the run without faults, or None."""
        if not self._mine and self._trace.resized is not None and step >= self._trace.resized[0]:  # not recorded
            begins, size = self._trace.resized
            return f"from step {begins} on it has {size} ranks instead of {self._trace.sizes[0][1]}"
        usual = {held.world for held in self._reference.witness}
        sizes = {held.world for held in self._mine.get(step, [])} - usual
        if not sizes:
            return None
        first = min(held.step for steps in self._mine.values() for held in steps if held.world in sizes)
        ranks, others = (" or ".join(map(str, sorted(some))) for some in (sizes, usual))
        return f"from step {first} on it has {ranks} ranks instead of {others}"

    def _pairs(self, step: int) -> list[tuple[StepState, StepState]]:
        mine = [held for held in self._mine.get(step, []) if (step, held.rank) in self._theirs]
        return [(held, self._theirs[step, held.rank]) for held in mine]

    def _unlike(self, step: int, field: str) -> list[Entry]:
        return list(_unlike(self._pairs(step), field, self._noise if field == "reached" else frozenset()))

    def _equal(self, step: int) -> int | None:
        return min((len(other.tracked) for _, other in self._pairs(step)), default=None)

    def _taken_over(self, step: int) -> tuple[tuple[int, int], ...]:
        return tuple(one for one in _taken_over(self._trace) if one[0] <= step)


# -- in words
def _not_repeatable(found: RunDifference) -> Diagnosis:
    facts = [fact.replace("without faults", "the other time") for fact in _facts(found)]
    if found.where == "before" and found.step == 0:
        remedy = (
            "draw what the model is built from with torch's, numpy's and Python's own generators, which rackrun seeds before main: no os.urandom, "
            "clock, process number, or order of a set."
        )
    else:
        remedy = (
            "draw what is random in a step with torch's, numpy's and Python's own generators, which rackrun seeds before every step, and read data "
            "by run.loader alone: no os.urandom, clock, process number, order of a set, or generator that is seeded by one of these."
        )
    return Diagnosis(
        kind="not repeatable",
        step=found.step,
        what=f"the script does not do the same twice, without any fault: {found.what}.",
        facts=tuple(facts),
        remedy=remedy,
    )


def _untracked(found: RunDifference, facts: tuple[str, ...], constant: bool) -> Diagnosis:
    names = list(dict.fromkeys(entry.name for entry in found.reached))
    first = names[0]
    owner = first.partition(".")[0].partition("[")[0]
    newcomers = sorted({rank for _, rank in found.taken_over} & {entry.rank for entry in found.reached})
    who = f"rank {newcomers[0]}" if newcomers else "a rank"
    if constant:
        return Diagnosis(
            kind="built otherwise",
            step=found.step,
            what=f"the run with faults is not the run without: {found.what}. The process that took over as {who} has built {_some(names)} otherwise.",
            facts=facts,
            remedy=f"build {first} alike in every process: a spare builds it before it knows its rank, so it may not depend on run.rank, the number "
            "of ranks, the process, the host or the clock.",
        )
    keep = (
        f"run.track({owner}={owner})" if "." in first and "(" not in owner else "run.track of an object that holds it"
    )
    how = [f"the process that took over as {who} did not get it"] if newcomers or not found.reached[0].attempt else []
    if any(entry.attempt for entry in found.reached):
        how.append("where the step was done again it was not put back")
    return Diagnosis(
        kind="untracked",
        step=found.step,
        what=f"the run with faults is not the run without: {found.what}. All that is tracked was equal before. {_some(names)}, which the step "
        f"function reaches, {'is' if len(names) == 1 else 'are'} not tracked: {', and '.join(how)}.",
        facts=facts,
        remedy=f"{keep}; an object of your own class needs state_dict and load_state_dict that cover all of its state, or its values belong into buffers of a tracked module.",
    )


def _facts(found: RunDifference) -> tuple[str, ...]:
    facts = []
    for step, rank in found.taken_over[-3:]:
        facts.append(f"taken over: rank {rank} by another process, which did step {step} first")
    if found.equal is not None:
        upto = found.step - (found.where == "before")
        too = f", and so is the loss of step {upto}" if found.where == "before" else ""
        facts.append(f"tracked: before step {upto} all {found.equal} tensors and values are equal, on all ranks{too}")
    facts += [f"tracked: {entry}" for entry in found.entries[:NAMED_MAX]]
    if len(found.entries) > NAMED_MAX:
        facts.append(f"tracked: and {len(found.entries) - NAMED_MAX} more")
    facts += [f"not tracked: {entry}" for entry in found.reached[:NAMED_MAX]]
    if len(found.reached) > NAMED_MAX:
        facts.append(f"not tracked: and {len(found.reached) - NAMED_MAX} more")
    return tuple(facts)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


# -- helpers
def _unlike(
    pairs: list[tuple[StepState, StepState]], field: str, noise: frozenset[str] = frozenset()
) -> Iterator[Entry]:
    """Yield the entries of ``field`` that differ. Worlds of different sizes hold other parts and are not compared."""
    for held, other in pairs:
        if held.world != other.world:
            continue
        a, b = getattr(held, field), getattr(other, field)
        for name in dict.fromkeys([*b, *a]):
            if a.get(name) != b.get(name) and name not in noise:
                yield Entry(held.rank, name, a.get(name, ""), b.get(name, ""), held.attempt)


def _taken_over(trace: Trace) -> list[tuple[int, int]]:
    """Return (step, rank) of the first step of every process that is not the first to hold its rank."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    first: dict[int, int] = {}
    for held in trace.witness:
        first.setdefault(held.rank, held.pid)
        if held.pid != first[held.rank]:
            found.setdefault((held.rank, held.pid), (held.step, held.rank))
    return sorted(found.values())


def _noise(reference: Trace, again: Trace | None) -> frozenset[str]:
    """Return the names of untracked values that differ between two runs without faults."""
    if again is None:
        return frozenset()
    theirs = {(held.step, held.rank): held for held in reference.witness}
    pairs = [(held, theirs[held.step, held.rank]) for held in again.witness if (held.step, held.rank) in theirs]
    return frozenset(entry.name for entry in _unlike(pairs, "reached"))


def _constant(reference: Trace, entries: tuple[Entry, ...]) -> bool:
    """Whether these values never change in the run without faults."""
    seen: dict[tuple[int, str], set[str]] = {}
    for held in reference.witness:
        for name, value in held.reached.items():
            seen.setdefault((held.rank, name), set()).add(value)
    return all(len(seen.get((entry.rank, entry.name), ())) <= 1 for entry in entries)
