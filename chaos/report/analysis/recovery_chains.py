"""Follow each strike to its recovery: noticed, decided, planned, resumed, and the first step afterwards.

This is a pure function of what was recorded. An event of the core belongs to the last strike before it at the same
worker (slot and incarnation), or at its tray. Where no event names a subject of the strike (a partition breaks other
ranks' connections, all ranks miss a bit), the first event before the next strike is taken, and called *inferred*.
Events that also happen without a fault are never inferred.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rackrun.chaos.evidence.history import (
    Committed,
    Entry,
    JobNotice,
    Noticed,
    Planned,
    Recovered,
    RecoveryInterrupted,
    Resumed,
    RungChosen,
    Strike,
    StrikeConfirmed,
    TakenBack,
)
from rackrun.chaos.report.analysis.journal_timeline import ORDINARY, SEEN, Happened, JournalTimeline
from rackrun.coordinator.observe.recoveries import RecoveryRecord

__all__ = ["Chain", "WaterfallStage", "chains_of", "entries_of", "stages_of"]

_INFERRED_S = 30.0
"""Seconds after the end of a fault within which an event may be inferred as its consequence, by its time alone."""
_BLUNT_S = 0.002
"""Events are stamped in whole milliseconds."""


@dataclass(frozen=True)
class Chain:
    """One strike, with what followed from it."""

    strike: Strike
    step: int = -1
    """The newest committed step when it struck, as the harness saw it."""
    took: bool | None = None
    detail: str = ""
    struck_s: float | None = None
    back_s: float | None = None
    seen: Happened | None = None
    inferred: bool = False
    recovery: RecoveryRecord | None = None
    """The recovery from the strike, or the last one that the job began."""
    overtaken: tuple[RecoveryRecord, ...] = ()
    """The recoveries before it, which were overtaken."""
    noticed_s: float | None = None
    decided_s: float | None = None
    planned_s: float | None = None
    resumed_s: float | None = None
    recovered_s: float | None = None
    first_step: int | None = None

    @property
    def at_s(self) -> float:
        return self.strike.at_s if self.struck_s is None else self.struck_s

    @property
    def until_s(self) -> float:
        """The last time at which the strike had any known effect."""
        return max(self.at_s, self.back_s or 0.0, self.recovered_s or 0.0, self.noticed_s or 0.0)

    @property
    def fault(self) -> str:
        return str(self.strike.fault["fault"])


@dataclass(frozen=True)
class WaterfallStage:
    """One stage of a recovery: a bar of the waterfall."""

    name: str
    from_s: float
    to_s: float


def chains_of(history: Sequence[Entry], job: JournalTimeline | None) -> list[Chain]:
    """Return one chain for each strike, in order."""
    found = [Chain(entry) for entry in history if isinstance(entry, Strike)]
    at = {chain.strike.strike: index for index, chain in enumerate(found)}
    for entry in history:
        if isinstance(entry, StrikeConfirmed):
            one = found[at[entry.strike]]
            found[at[entry.strike]] = replace(one, took=entry.took, detail=entry.detail, struck_s=entry.struck_s)
        elif isinstance(entry, TakenBack):
            found[at[entry.strike]] = replace(found[at[entry.strike]], back_s=entry.at_s)
    found = [replace(chain, step=_committed_at(chain.at_s, history)) for chain in found]
    if job is None:
        return found
    owners = _owners(found, job)
    return [_followed(chain, owners.get(index), job) for index, chain in enumerate(found)]


def stages_of(chain: Chain, job: JournalTimeline) -> list[WaterfallStage]:
    """Return consecutive stages from the strike to the first step afterwards. A stage that was skipped is left out."""
    recovery = chain.recovery
    if recovery is None or chain.noticed_s is None:
        return []
    restores = job.restores.get(recovery.generation, [])
    marks = [
        ("detect", chain.noticed_s),
        ("break", _moment(job, recovery.parked_ms)),
        ("decide", _moment(job, recovery.plan_ms)),
        ("regroup", min((one.began_s for one in restores), default=None)),
        ("restore", max((one.ended_s for one in restores), default=None)),
        ("resume", _moment(job, recovery.resumed_ms)),
        ("rework", _moment(job, recovery.committed_ms)),
    ]
    stages, reached = [], chain.at_s
    for name, until_s in marks:
        if until_s is not None and until_s > reached:
            stages.append(WaterfallStage(name, reached, until_s))
            reached = until_s
    return stages


def entries_of(chains: Sequence[Chain], job: JournalTimeline) -> list[Entry]:
    """Return the history's entries about the job, each with its cause."""
    found: list[Entry] = []
    told: dict[str, float] = {}

    def add(entry: Entry) -> str:
        if entry.id not in told:  # two strikes, one recovery: its cause is the first
            told[entry.id] = entry.at_s
            found.append(entry)
        return entry.id

    for chain in chains:
        if chain.seen is None or chain.noticed_s is None:
            continue
        seen = chain.seen
        cause = add(
            Noticed(
                at_s=chain.noticed_s,
                id=f"j{seen.id}",
                cause=chain.strike.id,
                by="job",
                event=seen.name,
                where=seen.slot or seen.tray,
                how=seen.how,
                inferred=chain.inferred,
            )
        )
        for recovery in filter(None, (*chain.overtaken, chain.recovery)):
            cause = _tell_recovery(recovery, cause, chain, job, add)
    for one in job.said:
        if one.name in ("Notice", "Answer"):
            add(JobNotice(at_s=one.at_s, id=f"j{one.id}", by="job", text=str(one.body["text"]), rule=one.rule))
    return found


def _tell_recovery(
    recovery: RecoveryRecord, cause: str, chain: Chain, job: JournalTimeline, add: Callable[[Entry], str]
) -> str:
    generation = recovery.generation
    for one in job.said:
        if one.name == "Decided" and one.body["generation"] == generation:
            decision = one.body["decision"]
            at_s = max(one.at_s, chain.at_s)
            more = {"generation": generation, "rung": decision["rung"], "reason": decision["reason"], "rule": one.rule}
            cause = add(RungChosen(at_s=at_s, id=f"j{one.id}", cause=cause, by="job", **more))
    for one in job.said:
        if one.name == "ResumeGeneration" and one.body["plan"]["generation"] == generation:
            plan = one.body["plan"]
            cause = add(
                Planned(
                    at_s=max(one.at_s, chain.at_s),
                    id=f"j{one.id}",
                    cause=cause,
                    by="job",
                    generation=generation,
                    world_size=plan["world_size"],
                    committed=plan["committed"][0],
                    rollback=plan["rollback"],
                    members={str(m["rank"]): m["slot"] for m in plan["members"] if m["fresh"]},
                    rule=one.rule,
                )
            )
    name = f"g{generation}"
    if recovery.overtaken:
        ended_s = _moment(job, recovery.resumed_ms or recovery.plan_ms or recovery.break_ms or recovery.fault_ms)
        return add(
            RecoveryInterrupted(
                at_s=ended_s or 0.0, id=f"{name}.overtaken", cause=cause, by="job", generation=generation
            )
        )
    if recovery.resumed_ms is not None:
        at_s = job.at_s(recovery.resumed_ms)
        cause = add(Resumed(at_s=at_s, id=f"{name}.resumed", cause=cause, by="job", generation=generation))
    if recovery.committed_ms is not None:
        at_s, step = job.at_s(recovery.committed_ms), _first_step(recovery, job)
        if step is not None:
            cause = add(
                Recovered(at_s=at_s, id=f"{name}.recovered", cause=cause, by="job", generation=generation, step=step)
            )
    return cause


def _committed_at(moment_s: float, history: Sequence[Entry]) -> int:
    """Return the newest committed step at that time, as the harness saw it; -1 if there was none."""
    steps = [entry for entry in history if isinstance(entry, Committed)]
    before = bisect.bisect_right(steps, moment_s, key=lambda entry: entry.at_s)
    return steps[before - 1].step if before else -1


# -- whose is what
def _owners(chains: list[Chain], job: JournalTimeline) -> dict[int, tuple[Happened, bool]]:
    """Return strike (by its index) -> the first event that it explains, and whether that is only inferred."""
    found: dict[int, tuple[Happened, bool]] = {}
    taken: set[int] = set()
    for event in job.seen:
        if event.name == "WorkerExited" and not event.body.get("signal") and event.body.get("exit_code") == 0:
            continue
        before = [
            i for i, chain in enumerate(chains) if chain.at_s - _BLUNT_S <= event.at_s and chain.took is not False
        ]
        named = [i for i in before if _names(event, chains[i].strike)]
        if named:
            taken.add(event.id)
            found.setdefault(max(named, key=lambda index: chains[index].at_s), (event, False))
    for index, chain in enumerate(chains):
        if index in found or chain.took is False:
            continue
        next_s = min((one.at_s for one in chains if one.at_s > chain.at_s), default=job.end_s + 1.0)
        until_s = min(next_s, max(chain.at_s, chain.back_s or 0.0) + _INFERRED_S)
        for event in job.seen:
            if (
                chain.at_s - _BLUNT_S <= event.at_s < until_s
                and event.id not in taken
                and event.name not in ORDINARY
                and not (event.name == "WorkerExited" and event.body.get("exit_code") == 0)
            ):
                found[index] = (event, True)
                break
    return found


def _names(event: Happened, strike: Strike) -> bool:
    assert event.name in SEEN
    if event.slot:
        return (event.slot, event.body.get("incarnation")) in strike.slots
    if event.name == "SlowRanksChanged":
        slots = {slot for slot, _ in strike.slots}
        return any(one["slot"] in slots for one in event.body["slow"])
    if "index" in event.body:
        return (f"{event.tray}/{event.body['index']}") in {slot for slot, _ in strike.slots}
    trays = {slot.partition("/")[0] for slot, _ in strike.slots}
    whole = any(whom.split(" ")[0] in ("tray", "agent", "rack") for whom in strike.whom)
    return whole and bool(event.tray) and event.tray in trays


def _followed(chain: Chain, owned: tuple[Happened, bool] | None, job: JournalTimeline) -> Chain:
    if owned is None:
        return chain
    event, inferred = owned
    chain = replace(chain, seen=event, inferred=inferred, noticed_s=max(event.at_s, chain.at_s))
    first = _recovery_of(event, chain, job)
    if first is None:
        return chain
    overtaken, recovery = [], first
    for later in [one for one in job.recoveries if one.generation > first.generation]:
        if not recovery.overtaken:
            break
        overtaken.append(recovery)
        recovery = later
    chain = replace(
        chain,
        recovery=recovery,
        overtaken=tuple(overtaken),
        decided_s=_moment(job, (overtaken or [recovery])[0].decided_ms),
        planned_s=_moment(job, recovery.plan_ms),
    )
    if recovery.overtaken:
        return chain
    recovered_s = _moment(job, recovery.committed_ms)
    first_step = None if recovered_s is None else _first_step(recovery, job)
    return replace(chain, resumed_s=_moment(job, recovery.resumed_ms), recovered_s=recovered_s, first_step=first_step)


def _recovery_of(event: Happened, chain: Chain, job: JournalTimeline) -> RecoveryRecord | None:
    """Return the recovery that the event led to.

    Either a worker that was struck is among those lost in that recovery, or the event lies in it, before its plan.
    """
    slots = {slot for slot, _ in chain.strike.slots}
    for recovery in job.recoveries:
        began_s, planned_s = job.at_s(recovery.fault_ms), _moment(job, recovery.plan_ms)
        before_plan = planned_s is None or event.at_s <= planned_s + _BLUNT_S
        lost = {one.slot for one in recovery.lost}
        led_to_it = (event.name != "WorkerExited" or planned_s is None) and began_s <= event.at_s + _BLUNT_S
        if before_plan and (slots & lost or led_to_it):
            return recovery
    return None


def _first_step(recovery: RecoveryRecord, job: JournalTimeline) -> int | None:
    """Return the first step of the new world."""
    if recovery.redone:
        return int(recovery.redone[0])
    for planned in job.plans:
        if planned.plan.generation == recovery.generation:
            back = planned.plan.rollback
            return (planned.plan.committed.step if back is None else int(back)) + 1
    return None


def _moment(job: JournalTimeline, ms: float | None) -> float | None:
    return None if ms is None else job.at_s(ms)
