"""Place the copies and the parity of shards so that ranks which fail together never hold both shard and protection.

It is pure. A rank's labels name what it fails together with. Equal labels of one level fail together, so a label must
be unique in the job ("rack-2/tray-7" rather than "7"). The plan follows from the sorted label table alone, so every
agent computes the same one.

* **Groups, not rings**: a shard is lost only when one small group is, so fewer combinations of losses hurt.
* **Protection, then balance, then nearness**: sets are formed inside the nearest level (one rack before two) that can
  fill them, and remaining ranks join sets elsewhere. When that is impossible, sets cross levels.
* **A set is never smaller than asked for while the labels allow it**, and never refused for a remainder: 17 trays in
  sets of 8 are sets of 8 and 9. Smaller sets, where there are too few domains, cost more; `statement` says how much.
* **Data parallelism's own copies count**: ranks with one shard id in enough domains need nothing.

``across="tray"`` promises the survival of trays only. What the loss of a rack does depends on where the ranks are: see
`ShardPlacement.statement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Literal, get_args

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.redundancy.failure_domain_sets import Domain, Site, assign_holders, form_sets
from rackrun.checkpoint.redundancy.galois import POINTS
from rackrun.errors import UsageError

__all__ = ["LEVELS", "Labels", "Level", "ShardPlacement", "PlacementError", "Redundancy", "place"]

Level = Literal["process", "gpu", "tray", "rack", "power"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The levels at which ranks fail together, the nearest first."""
_SET_MAX = POINTS // 2  # remaining ranks may make a set nearly twice as large
_WORK_MAX = 500_000  # ranks examined when losses are counted: half a second


class PlacementError(CheckpointError, UsageError):
    """The labels do not allow the protection that was asked for."""


@dataclass(frozen=True)
class Labels:
    """Where one rank is. ``None``: not known. A rank whose process is not known has a process of its own."""

    process: str | None = None
    gpu: str | None = None
    tray: str | None = None
    rack: str | None = None
    power: str | None = None

    def at(self, level: Level) -> str | None:
        """Return the label of a level."""
        label: str | None = getattr(self, level)
        return label

    @cached_property
    def order(self) -> tuple[object, ...]:
        """Sort key: the widest level first. An unknown label comes last."""
        power, rack, tray, gpu, process = self.power, self.rack, self.tray, self.gpu, self.process
        wide = (power is None, power or "", rack is None, rack or "", tray is None, tray or "")
        return (*wide, gpu is None, gpu or "", process is None, process or "")


@dataclass(frozen=True)
class Redundancy:
    """What is kept beyond a rank's own copy: nothing (`local`), copies (`mirror`), or parity (`xor`, `rs`)."""

    kind: Literal["local", "mirror", "xor", "rs"]
    width: int = 1
    """For mirror: copies, including the owner's. For xor and rs: members of a set. For local: 1."""
    across: Level = "process"
    """The level at which all holders of one shard, or members of one set, are distinct."""
    parity: int = 1
    """How many members of a set may be lost at once. 1 for xor."""

    @classmethod
    def local(cls) -> Redundancy:
        return cls("local")

    @classmethod
    def mirror(cls, copies: int = 2, across: Level = "tray") -> Redundancy:
        return cls("mirror", copies, across)

    @classmethod
    def xor(cls, set_size: int = 8, across: Level = "tray") -> Redundancy:
        return cls("xor", set_size, across)

    @classmethod
    def rs(cls, data: int = 8, parity: int = 2, across: Level = "tray") -> Redundancy:
        """Return Reed-Solomon over sets of ``data + parity`` members, any ``parity`` of which may be lost."""
        return cls("rs", data + parity, across, parity)

    def __post_init__(self) -> None:
        if self.across not in LEVELS:
            raise PlacementError(f"no level is called {self.across!r}.", remedy=f"Use one of {', '.join(LEVELS)}.")
        if self.kind == "rs" and not (1 <= self.parity < self.width and self.width + self.parity <= _SET_MAX):
            raise PlacementError(
                f"Reed-Solomon cannot use sets of {self.width - self.parity}+{self.parity} members.",
                remedy=f"Use 1+1 or more, and {_SET_MAX} members and parities together at the most.",
            )
        least = {"local": 1, "mirror": 2, "xor": 2, "rs": 2}[self.kind]
        if self.width < least:
            what = "copies, the owner's own included" if self.kind == "mirror" else "members of a set"
            raise PlacementError(
                f"redundancy with {self.width} {what} protects nothing.", remedy="Use 2 or more, or local()."
            )

    def kept(self) -> Fraction:
        """Return how many shards a rank keeps for others, by these terms; `ShardPlacement.kept` has the figure of a plan."""
        if self.in_sets:
            return Fraction(self.parity, self.width - self.parity)
        return Fraction(self.width - 1)

    @property
    def in_sets(self) -> bool:
        return self.kind in ("xor", "rs")

    def __str__(self) -> str:
        if self.kind == "local":
            return "local()"
        if self.kind == "rs":
            return f'rs(data={self.width - self.parity}, parity={self.parity}, across="{self.across}")'
        name = "copies" if self.kind == "mirror" else "set_size"
        return f'{self.kind}({name}={self.width}, across="{self.across}")'


@dataclass(frozen=True)
class ShardPlacement:
    """Which rank keeps what for which other rank. A shard is named by any rank that owns it."""

    redundancy: Redundancy
    labels: Mapping[int, Labels]
    twins: tuple[tuple[int, ...], ...]
    """The ranks of each shard, in the order of the label table. The first one sends."""
    sends: Mapping[int, tuple[int, ...]]
    """For mirror: sender -> the ranks that keep a copy for it, for each shard that needs one."""
    sets: tuple[tuple[int, ...], ...]
    """For xor and rs: the members of each set, in `rackrun.checkpoint.redundancy.stripe_set`'s order."""

    def holders(self, rank: int) -> tuple[int, ...]:
        """Return all ranks that hold a whole copy of this rank's shard: itself and its twins first."""
        twins = self._twins_of(rank)
        return twins + tuple(holder for twin in twins for holder in self.sends.get(twin, ()))

    def set_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the set of this rank's shard, or of a twin's when only the twin is in one; None when there is none."""
        return next((self._sets[twin] for twin in (rank, *self._twins_of(rank)) if twin in self._sets), None)

    def keeps_for(self, rank: int) -> tuple[int, ...]:
        """Return the owners whose shards this rank keeps a copy of (mirror)."""
        return tuple(sender for sender, holders in self.sends.items() if rank in holders)

    def kept(self) -> Fraction:
        """Return how many shards the rank that keeps most keeps for others."""
        copies = dict.fromkeys(self.labels, 0)
        for holders in self.sends.values():
            for holder in holders:
                copies[holder] += 1
        lost = self.redundancy.parity
        parity = max((Fraction(lost, len(members) - lost) for members in self.sets), default=Fraction(0))
        return max(parity, Fraction(max(copies.values(), default=0)))

    def survives(self, lost: AbstractSet[int]) -> bool:
        """Whether every shard can still be restored when the memory of these ranks is lost. Raises PlacementError."""
        if unknown := sorted(set(lost) - self.labels.keys()):
            raise PlacementError(f"no such ranks: {unknown}.", remedy="Name ranks of the label table.")
        whole = {
            rank for members in self.sets if len(lost & set(members)) <= self.redundancy.parity for rank in members
        }
        return all(
            any(holder not in lost for twin in twins for holder in (twin, *self.sends.get(twin, ())))
            or not whole.isdisjoint(twins)
            for twins in self.twins
        )

    def tolerance(self, level: Level) -> int | None:
        """Return the largest k such that the loss of any k domains is survived. None when labels are missing."""
        domains = _domains(self.labels, level)
        if len(domains) < len(self.labels):
            return None
        return min((self._fatal(twins, domains) for twins in self.twins), default=1) - 1

    def recoverable(self, level: Level, k: int) -> Fraction | None:
        """Return the share of all losses of ``k`` domains that is survived.

        None when labels are missing, or too many to count.
        """
        domains = _domains(self.labels, level)
        names = list(dict.fromkeys(domains.values()))
        if len(domains) < len(self.labels) or not 0 < k <= len(names) or comb(len(names), k) * len(domains) > _WORK_MAX:
            return None
        ranks = {name: [rank for rank, domain in domains.items() if domain == name] for name in names}
        patterns = [{rank for name in lost for rank in ranks[name]} for lost in combinations(names, k)]
        return Fraction(sum(map(self.survives, patterns)), len(patterns))

    def statement(self) -> str:
        """Return what the plan survives and what it costs, as a few lines of text."""
        return "\n".join([self._shape(), *self._survival(), *self._costs()])

    @cached_property
    def _shards(self) -> dict[int, tuple[int, ...]]:
        return {rank: twins for twins in self.twins for rank in twins}

    @cached_property
    def _sets(self) -> dict[int, tuple[int, ...]]:
        return {rank: members for members in self.sets for rank in members}

    def _twins_of(self, rank: int) -> tuple[int, ...]:
        if rank not in self._shards:
            raise PlacementError(f"no such rank: {rank}.", remedy="Name a rank of the label table.")
        return self._shards[rank]

    def _fatal(self, twins: Sequence[int], domains: Mapping[int, Domain]) -> int:
        """Return how few domains must be lost for this shard to be lost. It may be too low, never too high."""
        whole = {domains[holder] for twin in twins for holder in (twin, *self.sends.get(twin, ()))}
        others = [
            Counter(domains[other] for other in self._sets[twin] if other != twin)
            for twin in twins
            if twin in self._sets
        ]
        others = [of for of in others if self._fewest(of, whole)]
        more = max((self._fewest(of, whole) for of in others), default=0)
        if more == 1 and not set.intersection(*({d for d in of if not self._fewest(of, {*whole, d})} for of in others)):
            more = 2
        return len(whole) + more

    def _fewest(self, others: Counter[Domain], gone: AbstractSet[Domain]) -> int:
        """Return how many domains beside ``gone`` must be lost until a set has lost more members than it may.

        ``others``: how many members of the set, besides the lost rank, each domain has.
        """
        left = self.redundancy.parity - sum(others[domain] for domain in gone)
        count = 0
        for _, members in Counter({d: n for d, n in others.items() if d not in gone}).most_common():
            if left <= 0:
                break
            left, count = left - members, count + 1
        return count

    def _shape(self) -> str:
        head = f"{self.redundancy}: {len(self.labels)} ranks, {len(self.twins)} shards"
        if self.sets:
            sizes = sorted({len(members) for members in self.sets})
            return f"{head}, {len(self.sets)} sets of {' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))}"
        if self.redundancy.kind != "local" and not self.sends:
            return f"{head}; data parallelism has all the copies already"
        return head

    def _survival(self) -> Iterator[str]:
        for level in LEVELS:
            known = {labels.at(level) for labels in self.labels.values()} - {None}
            if (k := self.tolerance(level)) is None or (level != "process" and not known):
                continue
            share = float(self.recoverable(level, k + 1) or 0)
            if k:
                yield f"  {level:8} survives any {k} lost" + (
                    f", and {share:.1%} of the losses of {k + 1}" if share else ""
                )
            else:
                yield f"  {level:8} a single loss can be fatal" + (f"; {share:.1%} of them are not" if share else "")

    def _costs(self) -> Iterator[str]:
        yield f"  memory   {float(self.kept()):.1%} of a shard more on a rank, for each slot"
        pairs = [(sender, holder) for sender, holders in self.sends.items() for holder in holders]
        sent = Fraction(max(map(len, self.sends.values()), default=0))
        if self.sets:
            pairs = [pair for members in self.sets for pair in combinations(members, 2)]
            sent = Fraction(self.redundancy.parity)
        near = [a for a, b in pairs if (rack := self.labels[a].rack) is not None and rack == self.labels[b].rack]
        inside = f", {len(near) / len(pairs):.0%} of it inside a rack" if near else ""
        yield f"  traffic  a rank sends up to {sent} shard(s) a checkpoint{inside}"


def place(
    labels: Mapping[int, Labels], redundancy: Redundancy, replicas: Mapping[int, str | int] | None = None
) -> ShardPlacement:
    """Plan ``redundancy`` for the ranks of ``labels``.

    ``replicas``: rank -> shard id; ranks of equal id hold the same bytes. A rank without an id has a shard of its own.
    Raises `PlacementError` when the labels do not allow the protection.
    """
    order = sorted(labels, key=lambda rank: (labels[rank].order, rank))
    by_shard: dict[tuple[str, str | int], list[int]] = {}
    for rank in order:
        key = ("shard", replicas[rank]) if replicas is not None and rank in replicas else ("rank", rank)
        by_shard.setdefault(key, []).append(rank)
    twins = tuple(map(tuple, by_shard.values()))
    table = {rank: labels[rank] for rank in order}
    if redundancy.kind == "local":
        return ShardPlacement(redundancy, table, twins, {}, ())
    site = _site(table, redundancy)
    sends = _mirror(site, twins, redundancy.width) if redundancy.kind == "mirror" else {}
    sets = _sets(site, twins, redundancy) if redundancy.in_sets else ()
    if sends is None or sets is None:
        raise _refusal(site, table, redundancy)
    return ShardPlacement(redundancy, table, twins, sends, sets)


def _sets(site: Site, twins: Sequence[tuple[int, ...]], redundancy: Redundancy) -> tuple[tuple[int, ...], ...] | None:
    size, least = redundancy.width, redundancy.parity + 1
    exposed = [ranks[0] for ranks in twins if len({site.domain[rank] for rank in ranks}) < least]
    if not exposed:
        return ()
    # Shards that have their copies already become members only when the others cannot be protected without them.
    sets = form_sets(site, exposed, size, least) or form_sets(site, list(site.domain), size, least)
    return None if sets is None else tuple(map(tuple, sets))


def _mirror(site: Site, twins: Sequence[tuple[int, ...]], copies: int) -> dict[int, tuple[int, ...]] | None:
    taken = {ranks[0]: {site.domain[rank] for rank in ranks} for ranks in twins}
    taken = {sender: domains for sender, domains in taken.items() if len(domains) < copies}
    alike = all(len(domains) == 1 for domains in taken.values())
    if alike and (copies == 2 or len(taken) == len(site.domain)):
        groups = form_sets(site, list(taken), copies, least=copies)
        if groups is not None:
            return {
                sender: tuple(group[(i + n) % len(group)] for n in range(1, copies))
                for group in groups
                for i, sender in enumerate(group)
            }
    return assign_holders(site, taken, copies)


def _site(labels: Mapping[int, Labels], redundancy: Redundancy) -> Site:
    across = redundancy.across
    domains = _domains(labels, across)
    if unknown := [rank for rank in labels if rank not in domains]:
        raise PlacementError(
            f"{redundancy} needs the {across} of every rank; it is not known of rank {unknown[0]}"
            f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}.",
            remedy=f"Give the label, or protect a level that is known ({_known(labels)}).",
        )
    return Site(domains, [_domains(labels, level) for level in LEVELS[LEVELS.index(across) + 1 :]])


def _refusal(site: Site, labels: Mapping[int, Labels], redundancy: Redundancy) -> PlacementError:
    across = redundancy.across
    counts = sorted(((len(ranks), str(site.domain[ranks[0]])) for ranks in site.by_domain(labels)), reverse=True)
    listed = ", ".join(f"{name}: {count}" for count, name in counts[:4]) + (", ..." if len(counts) > 4 else "")
    return PlacementError(
        f"{redundancy} is impossible for {len(labels)} ranks on {len(counts)} {across}(s) ({listed}).",
        remedy=f"Spread the ranks over more {across}s, ask for less, or protect another level ({_known(labels)}).",
    )


def _known(labels: Mapping[int, Labels]) -> str:
    return ", ".join(level for level in LEVELS if len(_domains(labels, level)) == len(labels))


def _domains(labels: Mapping[int, Labels], level: Level) -> dict[int, Domain]:
    """Return rank -> domain.

    A rank without a known label is absent, but an unknown process counts as the rank's own.
    """
    found: dict[int, Domain] = {}
    for rank, label in labels.items():
        name = label.at(level)
        if name is not None or level == "process":
            found[rank] = rank if name is None else name
    return found
