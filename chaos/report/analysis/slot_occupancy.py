"""Compute which worker was in which slot, and when: a pure function of a job's journal."""

from __future__ import annotations

from typing import NamedTuple

from rackrun.chaos.report.analysis.journal_timeline import JournalTimeline

__all__ = ["SlotOccupancy", "seats_of"]


class SlotOccupancy(NamedTuple):
    """The stay of one worker in a slot, as one rank."""

    slot: str
    incarnation: int
    rank: int | None
    """The rank; None: the worker starts, or waits as a spare."""
    from_s: float
    to_s: float
    how: str
    """How its process ended; "": it did not end then, or it ended by itself."""


def seats_of(job: JournalTimeline) -> list[SlotOccupancy]:
    """Return all stays, by slot and in the order of time. A rank that stays over several generations gives one stay."""
    ranks: dict[tuple[str, int], list[tuple[float, int | None]]] = {}
    members: dict[tuple[str, int], int] = {}
    for planned in job.plans:
        now = {(str(m.slot), int(m.incarnation)): int(m.rank) for m in planned.plan.members}
        for who in members.keys() | now.keys():
            if members.get(who) != now.get(who):
                ranks.setdefault(who, []).append((planned.at_s, now.get(who)))
        members = now
    found = []
    for life in job.lives:
        end_s = job.end_s if life.ended_s is None else life.ended_s
        rank, since_s = None, life.began_s
        for at_s, then in ranks.get((life.slot, life.incarnation), ()):
            moment_s = min(max(at_s, life.began_s), end_s)
            if moment_s > since_s:
                found.append(SlotOccupancy(life.slot, life.incarnation, rank, since_s, moment_s, ""))
            rank, since_s = then, moment_s
        found.append(SlotOccupancy(life.slot, life.incarnation, rank, since_s, end_s, life.how))
    return sorted(found, key=lambda seat: (seat.slot, seat.from_s))
