"""Who sat in which slot, and when: a pure function of what a job's journal tells."""

from __future__ import annotations

from typing import NamedTuple

from rackrun.chaos.report.analysis.journal_timeline import Recorded

__all__ = ["Seat", "seats_of"]


class Seat(NamedTuple):
    slot: str
    incarnation: int
    rank: int | None
    """None: it starts, or waits as a spare."""
    from_s: float
    to_s: float
    how: str
    """Its process ended; "": it did not then, or by itself."""


def seats_of(job: Recorded) -> list[Seat]:
    """By slot, then in time. A rank that stays in its slot over several generations sits there once."""
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
                found.append(Seat(life.slot, life.incarnation, rank, since_s, moment_s, ""))
            rank, since_s = then, moment_s
        found.append(Seat(life.slot, life.incarnation, rank, since_s, end_s, life.how))
    return sorted(found, key=lambda seat: (seat.slot, seat.from_s))
