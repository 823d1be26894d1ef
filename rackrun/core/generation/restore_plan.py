"""Which unit is committed, and where each rank's state comes from: pure functions of fresh reports.

**Committed.** The gate of a unit is an all-reduce over the whole world. If one rank saw it pass, every rank has entered
it, with its gradients complete. So ``committed = max(passed)`` over the survivors: a rank that entered that gate
without seeing it pass can still apply the unit. The committed unit is never below that of the last plan (`floor`): a
survivor may have been told it, may have applied it, and may be the one that is lost now, while all others still stand
where they entered.

**State.** A fresh member copies from a live member of its replica class or, if its shard has no live copy, from a
snapshot of exactly the committed unit. If there is none, all ranks go back to the newest step of which each has a
snapshot. States are never mixed: one plan has one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rackrun.protocol.commands import Restore
from rackrun.protocol.ids import BEGIN, Incarnation, Position, Rank, SlotId, Step, TrayId

__all__ = ["StoredSnapshots", "Rebuild", "ParkReport", "StatePlan", "committed", "state_plan"]

Rebuild: TypeAlias = Callable[[Rank, Step], Restore | None]
"""Returns how a rank's snapshot of a step can be rebuilt; None if it cannot."""


class ParkReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a parked member with state reports about itself."""

    passed: Position = BEGIN
    entered: Position = BEGIN
    gate: tuple[float, ...] = ()
    snapshots: tuple[Step, ...] = ()


class StoredSnapshots(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Snapshots on a live tray: left there by a worker that is gone, or copied from another tray."""

    tray: TrayId
    """The tray that holds them."""
    slot: SlotId
    incarnation: Incarnation
    where: str
    """The agent's address for them, ``host:port/slot/incarnation``."""
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Where the state of each fresh rank comes from, and the step that all go back to, if they do."""

    fresh: tuple[Rank, ...]
    """Ranks that receive their state in this plan."""
    restores: tuple[Restore, ...]
    rollback: Step | None = None


def committed(
    reports: Mapping[Rank, ParkReport], floor: Position, floor_gate: tuple[float, ...] = ()
) -> tuple[Position, tuple[float, ...]]:
    """Return the last committed unit and the reduced values of its gate. ``floor`` was committed before."""
    position = max((report.passed for report in reports.values()), default=floor)
    if position < floor or (position == floor and floor_gate):
        return floor, floor_gate
    told = [rank for rank, report in reports.items() if report.gate and report.passed == position]
    return position, reports[min(told)].gate if told else ()


def state_plan(
    *,
    reports: Mapping[Rank, ParkReport],
    kept: Mapping[Rank, Sequence[StoredSnapshots]],
    classes: Mapping[Rank, str],
    world_size: int,
    upto: Position,
    rollback_incomplete: bool = False,
    trusted: Position | None = None,
    rebuild: Rebuild = lambda rank, step: None,  # noqa: ARG005
) -> StatePlan | None:
    """Return where every rank's state comes from; None if some shard has no copy, so that only a restart helps.

    ``reports`` holds the members with state; every other rank is fresh. A rank that reports that it never entered the
    gate of the committed unit is fresh too: that is a contradiction, and its state cannot be made that of ``upto``.

    ``rollback_incomplete``: members have unequal states in memory: a rollback was interrupted, so some have gone back
    and others have not, or replicas differ and nobody can say which are right. Only another rollback makes them equal.
    ``trusted``: state from after this position, in memory or in a snapshot, is not used, even if it
    is intact; None: all state is used.
    """
    clean = {rank: report for rank, report in reports.items() if report.entered >= upto or report.passed >= upto}
    missing = [Rank(rank) for rank in range(world_size) if rank not in clean]
    if clean and not rollback_incomplete and (trusted is None or upto <= trusted):
        snapshot_of = Step(upto.step) if upto.phase == 0 else None  # a phase may have changed the step's state
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
    kept: Mapping[Rank, Sequence[StoredSnapshots]],
    classes: Mapping[Rank, str],
    rebuild: Rebuild,
) -> Restore | None:
    """Return how ``rank`` is restored: from a live replica, else from a snapshot of ``step``, else from its set; None:
    not at all.

    ``replicas`` holds the ranks with state, by class; ``rank`` is not among them.
    """
    if sources := replicas.get(classes.get(rank, "")):
        return Restore(rank=rank, sources=sources)
    if step is None:
        return None
    if snapshot := _kept(rank, step, kept):
        return Restore(rank=rank, snapshot=snapshot)
    return rebuild(rank, step)


def _kept(rank: Rank, step: Step, kept: Mapping[Rank, Sequence[StoredSnapshots]]) -> str:
    return next((holder.where for holder in kept.get(rank, ()) if step in holder.steps), "")


def _by_class(holders: Mapping[Rank, ParkReport], classes: Mapping[Rank, str]) -> dict[str, tuple[Rank, ...]]:
    """Group ranks by replica class. Done once for all missing ranks, because each may have as many sources as there are
    ranks."""
    found: dict[str, list[Rank]] = {}
    for rank in sorted(holders):
        if known := classes.get(rank, ""):
            found.setdefault(known, []).append(rank)
    return {known: tuple(ranks) for known, ranks in found.items()}


def _candidates(
    reports: Mapping[Rank, ParkReport], kept: Mapping[Rank, Sequence[StoredSnapshots]], upto: Position
) -> tuple[Step, ...]:
    """Return the steps of which any snapshot exists, newest first.

    Without a survivor nothing bounds them: a snapshot is sealed after its gate, so the sealed snapshots are all that is
    known about what is committed.
    """
    steps = dict.fromkeys(step for report in reports.values() for step in report.snapshots)
    steps |= dict.fromkeys(step for holders in kept.values() for holder in holders for step in holder.steps)
    bounded = [step for step in steps if not reports or Position(step) <= upto]
    return tuple(sorted(bounded, reverse=True))


def _go_back(
    step: Step,
    reports: Mapping[Rank, ParkReport],
    kept: Mapping[Rank, Sequence[StoredSnapshots]],
    classes: Mapping[Rank, str],
    world_size: int,
    rebuild: Rebuild,
) -> StatePlan | None:
    """Return a plan in which all ranks have the state of ``step``; None if it does not exist for some rank.

    A rank uses its own snapshot, one that its last owner left, a replica that has gone back itself, or its set. A
    member without its own snapshot (it joined after that step) becomes fresh again.
    """
    own = {rank: report for rank, report in reports.items() if step in report.snapshots}
    replicas = _by_class(own, classes)
    restores: list[Restore] = []
    for rank in (Rank(rank) for rank in range(world_size) if rank not in own):
        snapshot = _kept(rank, step, kept)  # the rank's own tray may have it: then no other rank has to send it
        restore = (
            Restore(rank=rank, snapshot=snapshot)
            if snapshot
            else _restore(rank, step, replicas, kept, classes, rebuild)
        )
        if restore is None:
            return None
        restores.append(restore)
    return StatePlan(fresh=tuple(restore.rank for restore in restores), restores=tuple(restores), rollback=step)
