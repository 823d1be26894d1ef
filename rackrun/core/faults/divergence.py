"""Who is to blame when ranks that should hold the same state do not. A pure function of the digests that they have taken.

A rank whose memory or update is wrong spoils the others too: its gradients go into everybody's sum. But not at once. A digest taken
right before the update of a step shows the wrong rank alone; the others follow with the next step, all alike. So the *first* step
counts at which not all digests of a shard are the same: up to there all have computed the same thing, and more than half of them
are right.

- Three replicas or more: the others are alike, spoilt or not, and outvote the one.
- Two: nobody is outvoted. Both go back and compute once more; each rank has two votes then, one for each time, and a fault that does
  not come again has one of four. One that comes again with other bits has two, each alone: who repeats itself is believed.

Where no value has more than half of the votes, and those that repeat themselves do not agree, nobody is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rackrun.protocol.ids import Rank

__all__ = ["Pass", "culprits"]

Pass: TypeAlias = Mapping[Rank, Mapping[int, int]]
"""What was seen while some steps were computed once: rank -> step -> digest of its state before the update of that step."""


def culprits(kinds: Sequence[Sequence[Rank]], passes: Sequence[Pass]) -> tuple[Rank, ...] | None:
    """The ranks to blame; () when nobody can say; None when all agree.

    ``kinds``: ranks of one kind hold the same shards. ``passes`` are over the same steps, from the same state. A step of which a
    digest is missing says nothing about that kind.
    """
    for step in sorted({step for one in passes for digests in one.values() for step in digests}):
        told = [_votes(kind, passes, step) for kind in kinds]
        differing = [votes for votes in told if len({digest for _, digest in votes}) > 1]
        if differing:
            return _outvoted(differing)
    return None


def _votes(kind: Sequence[Rank], passes: Sequence[Pass], step: int) -> list[tuple[Rank, int]]:
    found = [(rank, one.get(rank, {}).get(step)) for one in passes for rank in kind]
    known = [(rank, digest) for rank, digest in found if digest is not None]
    return known if len(known) == len(found) else []


def _outvoted(differing: Sequence[Sequence[tuple[Rank, int]]]) -> tuple[Rank, ...]:
    found: set[Rank] = set()
    for votes in differing:
        right = _right(votes)
        if right is None:
            return ()
        found |= {rank for rank, digest in votes if digest != right}
    return tuple(sorted(found))


def _right(votes: Sequence[tuple[Rank, int]]) -> int | None:
    (most, count), *_ = Counter(digest for _, digest in votes).most_common(1)
    if 2 * count > len(votes):
        return most
    told: dict[Rank, set[int]] = {}
    for rank, digest in votes:
        told.setdefault(rank, set()).add(digest)
    repeated = {min(digests) for digests in told.values() if len(digests) == 1}
    return repeated.pop() if len(repeated) == 1 and len(votes) > len(told) else None
