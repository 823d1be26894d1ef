"""What is committed, and where everyone's state comes from. Pure functions of fresh reports; nothing is remembered here.

**Committed.** The gate of a unit is an all-reduce over the whole world: if one rank saw it pass, every rank has entered
it, with its gradients complete. So ``committed = max(passed)`` over the survivors: whoever entered that gate without
seeing it pass can still apply it. And it is never below what the last plan said (`floor`): a survivor may have been
told so, may have applied it, and may be the one that is lost now, while all others still stand where they entered.

**State.** A fresh member copies from a live member of its replica class, or, where its shard has no live copy, from a
snapshot of exactly what is committed. Where there is none, everybody goes back to the newest step that everybody still
has. Never a mixture: one plan, one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rackrun.protocol.commands import Restore
from rackrun.protocol.ids import BEGIN, Incarnation, Position, Rank, SlotId, Step, TrayId

__all__ = ["Kept", "Rebuild", "Report", "StatePlan", "committed", "state_plan"]

Rebuild: TypeAlias = Callable[[Rank, Step], Restore | None]
"""From what a rank's snapshot of a step can be rebuilt; None when it cannot."""


class Report(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a parked member that has state says of itself."""

    passed: Position = BEGIN
    entered: Position = BEGIN
    gate: tuple[float, ...] = ()
    snapshots: tuple[Step, ...] = ()


class Kept(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Snapshots of a worker, on a tray that lives: what one that is gone has left, or copies on another tray."""

    tray: TrayId
    """Where they lie."""
    slot: SlotId
    incarnation: Incarnation
    where: str
    """``host:port/slot/incarnation``."""
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    fresh: tuple[Rank, ...]
    """Ranks that receive their state in this plan."""
    restores: tuple[Restore, ...]
    rollback: Step | None = None


def committed(
    reports: Mapping[Rank, Report], floor: Position, floor_gate: tuple[float, ...] = ()
) -> tuple[Position, tuple[float, ...]]:
    """The last unit that is committed, and what its gate reduced to. ``floor`` is what was committed already."""
    position = max((report.passed for report in reports.values()), default=floor)
    if position < floor or (position == floor and floor_gate):
        return floor, floor_gate
    told = [rank for rank, report in reports.items() if report.gate and report.passed == position]
    return position, reports[min(told)].gate if told else ()


def state_plan(
    *,
    reports: Mapping[Rank, Report],
    kept: Mapping[Rank, Sequence[Kept]],
    classes: Mapping[Rank, str],
    world_size: int,
    upto: Position,
    torn: bool = False,
    trusted: Position | None = None,
    rebuild: Rebuild = lambda rank, step: None,  # noqa: ARG005
) -> StatePlan | None:
    """Where every rank's state comes from; None if some shard has no copy at all, and only a new start helps.

    ``reports`` holds the members with state: every other rank is fresh. So is one that says it never entered the gate
    of what is committed (a contradiction; its state cannot be made that of ``upto``, so it is replaced). ``torn``: a rollback was broken off, so some
    members have gone back and others have not; only another rollback makes them one again. ``trusted``: what is later than this, in memory or in a
    snapshot, is of no use, however whole it is; None: all is of use.
    """
    clean = {rank: report for rank, report in reports.items() if report.entered >= upto or report.passed >= upto}
    missing = [Rank(rank) for rank in range(world_size) if rank not in clean]
    if clean and not torn and (trusted is None or upto <= trusted):
        snapshot_of = Step(upto.step) if upto.phase == 0 else None  # a phase may have changed what the step left
        replicas = _by_class(clean, classes) if missing else {}
        found = [_restore(rank, snapshot_of, replicas, kept, classes, rebuild) for rank in missing]
        restores = tuple(restore for restore in found if restore is not None)
        if len(restores) == len(missing):
            return StatePlan(fresh=tuple(missing), restores=restores)
    for step in _candidates(reports, kept, upto):
        if trusted is not None and Position(step) > trusted:
            continue
        plan = _go_back(step, reports, kept, classes, world_size, rebuild)
        if plan is not None:
            return plan
    return None


def _restore(
    rank: Rank,
    step: Step | None,
    replicas: Mapping[str, tuple[Rank, ...]],
    kept: Mapping[Rank, Sequence[Kept]],
    classes: Mapping[Rank, str],
    rebuild: Rebuild,
) -> Restore | None:
    """From a live replica; or from a snapshot of ``step``, or from the others of its set. ``replicas``: those with state, by class;
    ``rank`` is none of them."""
    if sources := replicas.get(classes.get(rank, "")):
        return Restore(rank=rank, sources=sources)
    if step is None:
        return None
    if snapshot := _kept(rank, step, kept):
        return Restore(rank=rank, snapshot=snapshot)
    return rebuild(rank, step)


def _kept(rank: Rank, step: Step, kept: Mapping[Rank, Sequence[Kept]]) -> str:
    return next((holder.where for holder in kept.get(rank, ()) if step in holder.steps), "")


def _by_class(holders: Mapping[Rank, Report], classes: Mapping[Rank, str]) -> dict[str, tuple[Rank, ...]]:
    """Once for all that are missing: each may have as many sources as there are ranks."""
    found: dict[str, list[Rank]] = {}
    for rank in sorted(holders):
        if known := classes.get(rank, ""):
            found.setdefault(known, []).append(rank)
    return {known: tuple(ranks) for known, ranks in found.items()}


def _candidates(
    reports: Mapping[Rank, Report], kept: Mapping[Rank, Sequence[Kept]], upto: Position
) -> tuple[Step, ...]:
    """Steps of which somebody has a snapshot, newest first. Without a survivor what is sealed is all that is known of
    what is committed (a snapshot is sealed after its gate), so nothing bounds it."""
    steps = dict.fromkeys(step for report in reports.values() for step in report.snapshots)
    steps |= dict.fromkeys(step for holders in kept.values() for holder in holders for step in holder.steps)
    bounded = [step for step in steps if not reports or Position(step) <= upto]
    return tuple(sorted(bounded, reverse=True))


def _go_back(
    step: Step,
    reports: Mapping[Rank, Report],
    kept: Mapping[Rank, Sequence[Kept]],
    classes: Mapping[Rank, str],
    world_size: int,
    rebuild: Rebuild,
) -> StatePlan | None:
    """Everybody at the end of ``step``: from its own snapshot, from one that its rank's last owner left, from a
    replica that has gone back itself, or from the others of its set. A member without its own (it joined after that step) is fresh once more."""
    own = {rank: report for rank, report in reports.items() if step in report.snapshots}
    replicas = _by_class(own, classes)
    restores: list[Restore] = []
    for rank in (Rank(rank) for rank in range(world_size) if rank not in own):
        snapshot = _kept(rank, step, kept)  # its own tray has it: nobody else has to send
        restore = (
            Restore(rank=rank, snapshot=snapshot)
            if snapshot
            else _restore(rank, step, replicas, kept, classes, rebuild)
        )
        if restore is None:
            return None
        restores.append(restore)
    return StatePlan(fresh=tuple(restore.rank for restore in restores), restores=tuple(restores), rollback=step)
