"""Which ranks are to blame when ranks that should hold the same state do not: a pure function of the digests they took.

A rank whose memory or update is wrong also corrupts the others, because its gradients go into all sums, but not at
once. A digest taken right before the update of a step shows the wrong rank alone; the others follow with the next step,
all alike. So only the *first* step counts at which the digests of a shard differ: up to there all ranks have computed
the same, and more than half of them are right.

- Three replicas or more: the others are alike, corrupted or not, and outvote the wrong one.
- Two: neither is outvoted. Both go back and compute again. Each rank then has two votes, one for each time, and a fault
  that does not come again has one of four. A fault that comes again with other bits has two, which differ: the rank
  that repeats itself is believed.

If no value has more than half of the votes, and the ranks that repeat themselves do not agree, no rank is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rackrun.protocol.ids import Rank

__all__ = ["Pass", "culprits"]

Pass: TypeAlias = Mapping[Rank, Mapping[int, int]]
"""Digests from one computation of some steps: rank -> step -> digest of its state before that step's update."""


def culprits(kinds: Sequence[Sequence[Rank]], passes: Sequence[Pass]) -> tuple[Rank, ...] | None:
    """Return the ranks to blame; () if they cannot be determined; None if all agree.

    ``kinds``: ranks of one kind hold the same shards. ``passes`` cover the same steps, computed from the same state. A
    step of which a digest is missing says nothing about that kind.
    """
    for step in sorted({step for one in passes for digests in one.values() for step in digests}):
        told = [_votes(kind, passes, step) for kind in kinds]
        differing = [votes for votes in told if len({digest for _, digest in votes}) > 1]
        if differing:
            return _outvoted(differing)
    return None


def _votes(kind: Sequence[Rank], passes: Sequence[Pass], step: int) -> list[tuple[Rank, int]]:
    """Return the digests of one step from all passes, with their ranks; [] if one is missing."""
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
    """Return the digest with more than half of the votes, else the one of the ranks that repeat themselves; None if
    there is none."""
    (most, count), *_ = Counter(digest for _, digest in votes).most_common(1)
    if 2 * count > len(votes):
        return most
    told: dict[Rank, set[int]] = {}
    for rank, digest in votes:
        told.setdefault(rank, set()).add(digest)
    repeated = {min(digests) for digests in told.values() if len(digests) == 1}
    return repeated.pop() if len(repeated) == 1 and len(votes) > len(told) else None
