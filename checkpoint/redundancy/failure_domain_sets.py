"""Form sets over distinct failure domains, and assign holders outside a sender's domain.

This is the combinatorics below `rackrun.checkpoint.redundancy.shard_placement`. It is pure, and deterministic in the
order of its input. Nothing here knows what a domain is. ``None`` means that it cannot be done; the caller words the
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Domain", "Site", "assign_holders", "form_sets"]

Domain = str | int


@dataclass(frozen=True)
class Site:
    """The ranks as grouped by failure domain at the protected level, and at the levels outside it."""

    domain: Mapping[int, Domain]
    """Rank -> its failure domain at the protected level, for all ranks."""
    outer: Sequence[Mapping[int, Domain]]
    """Rank -> domain, for each level outside the protected one, nearest first.

    Ranks without a known label are absent.
    """

    def distance(self, a: int, b: int) -> int:
        """Return the index of the nearest outer level that both ranks share; the number of levels if there is none."""
        for distance, level in enumerate(self.outer):
            if a in level and level[a] == level.get(b):
                return distance
        return len(self.outer)

    def by_domain(self, ranks: Iterable[int]) -> list[list[int]]:
        return _grouped(ranks, self.domain)


def form_sets(site: Site, ranks: Sequence[int], size: int, least: int) -> list[list[int]] | None:
    """Form sets of ``size`` or more ranks in distinct domains; None when that is impossible.

    Sets are formed within the nearest level that can fill them, and remaining ranks join them. Where that is
    impossible, sets cross levels. Where there are too few domains, sets are as large as possible, at least ``least``.
    """
    sets: list[list[int]] = []
    pending = list(ranks)
    for level in (*site.outer, dict.fromkeys(ranks, 0)):
        for group in _grouped((rank for rank in pending if rank in level), level):
            sets += _full(site, group, size) or []
        placed = {rank for members in sets for rank in members}
        pending = [rank for rank in pending if rank not in placed]
    if _join(site, sets, pending):
        return sets
    return _deal(site.by_domain(ranks), size, least)


def assign_holders(site: Site, taken: Mapping[int, set[Domain]], copies: int) -> dict[int, tuple[int, ...]] | None:
    """Return each sender's holders, so that ``copies`` distinct domains have its shard; None when impossible.

    The domains that a sender has ``taken`` already count. The least loaded rank is chosen first, then the nearest. Then
    loads are evened out, exactly so when each sender needs one holder.
    """
    load = dict.fromkeys(site.domain, 0)
    sends: dict[int, list[int]] = {sender: [] for sender in taken}
    for sender, own in taken.items():
        for _ in range(copies - len(own)):
            used = own | {site.domain[holder] for holder in sends[sender]}
            free = [rank for rank in load if site.domain[rank] not in used]
            if not free:
                return None
            holder = min(free, key=lambda rank: (load[rank], site.distance(sender, rank)))
            sends[sender].append(holder)
            load[holder] += 1
    while chain := _relief(site, taken, sends, load):
        for sender, old, new in chain:
            sends[sender][sends[sender].index(old)] = new
            load[old] -= 1
            load[new] += 1
    return {sender: tuple(holders) for sender, holders in sends.items()}


def _grouped(ranks: Iterable[int], key: Mapping[int, Domain]) -> list[list[int]]:
    found: dict[Domain, list[int]] = {}
    for rank in ranks:
        found.setdefault(key[rank], []).append(rank)
    return list(found.values())


def _full(site: Site, ranks: Sequence[int], size: int) -> list[list[int]] | None:
    """Form sets of ``size`` or more; None when that is impossible.

    Whole domains stay together where they can. Two lost trays then meet in all of their sets or in none, so more pairs
    of trays are harmless.
    """
    domains = sorted(site.by_domain(ranks), key=len, reverse=True)
    for count in dict.fromkeys((len(domains) // size, 1)):
        made = [_deal(domains[i::count], size, size) for i in range(count)]
        if made and all(made):
            return [members for sets in made if sets for members in sets]
    return None


def _deal(domains: Sequence[Sequence[int]], size: int, least: int) -> list[list[int]] | None:
    """Deal out the ranks of one domain after the other, so that no set gets two of one domain; None when impossible."""
    flat = [rank for ranks in domains for rank in ranks]
    count = max(max(map(len, domains), default=0), len(flat) // size, 1)
    if len(flat) < least * count:
        return None
    return [flat[i::count] for i in range(count)]


def _join(site: Site, sets: Sequence[list[int]], pending: Iterable[int]) -> bool:
    """Add each pending rank to the nearest, then smallest set without its domain. Return False when there is none."""
    for rank in pending:
        free = [members for members in sets if all(site.domain[rank] != site.domain[other] for other in members)]
        if not free:
            return False
        min(free, key=lambda members: (site.distance(rank, members[0]), len(members))).append(rank)
    return True


def _relief(
    site: Site, taken: Mapping[int, set[Domain]], sends: Mapping[int, Sequence[int]], load: Mapping[int, int]
) -> list[tuple[int, int, int]]:
    """Return moves (sender, old holder, new holder) that shift load from a rank to one with at least two copies fewer.

    What a more loaded rank reached is not searched again: it leads to no rank light enough for a less loaded one
    either.
    """
    chains: dict[int, list[tuple[int, int, int]]] = {}
    lightest = min(load.values())
    for heavy in sorted(load, key=load.__getitem__, reverse=True):
        if load[heavy] < lightest + 2:
            break
        if heavy in chains:
            continue
        chains[heavy] = []
        queue = [heavy]
        for holder in queue:
            moved = {sender for sender, _, _ in chains[holder]}
            for sender in (s for s, holders in sends.items() if holder in holders and s not in moved):
                used = taken[sender] | {site.domain[other] for other in sends[sender] if other != holder}
                for rank, copies in load.items():
                    if rank in chains or site.domain[rank] in used:
                        continue
                    chains[rank] = [*chains[holder], (sender, holder, rank)]
                    if copies <= load[heavy] - 2:
                        return chains[rank]
                    queue.append(rank)
    return []
