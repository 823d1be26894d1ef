"""What the commit protocol says and writes down: the log's records, and the events and outputs of its coordinator.

*Redundancy* of a shard is the smallest number of failure domains whose loss leaves it without a source: the number of
distinct domains that hold it whole, or, in a parity set, what rebuilding adds. Mirrors and parity are one rule that
way: ``copies=2`` means "no single domain takes it", however that is done.

Traps:

* A copy is known by its digest, never by its number alone: a generation is (generation, step, epoch), and a copy that
  differs from the record is no copy of it.
* ``layout_hash`` is of one rank's image, so it differs between owners of a sharded state. It is compared between the
  copies of one owner, and with the record.
* A parity block is named by the member of the set that keeps it, not by the shards it protects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal, TypeAlias

import msgspec

from rackrun.checkpoint.base.digest import content_digest
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError

__all__ = [
    "Copy", "Kind", "ParitySet", "rebuild_inputs", "redundancy", "domains_of",
    "CommitRecord", "ShardRecord", "decode_record",
    "Event", "GenerationBegan", "ShardSealed", "Confirmed", "Deadline", "HolderJoined", "HolderLost", "EpochBegan",
    "Pinned", "Unpinned",
    "Output", "Begin", "Commit", "Retire", "Abandon", "UnderReplicated", "Heal", "Disagreement",
]  # fmt: skip

Kind: TypeAlias = Literal["data", "parity"]
Item: TypeAlias = tuple[int, Kind]
"""(owner, kind): a shard, or the parity block that a member of a set keeps."""
_KINDS: tuple[Kind, Kind] = ("data", "parity")


class _Value(msgspec.Struct, frozen=True, kw_only=True, order=True):
    pass


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    pass


# -- copies and sets -------------------------------------------------------------------------------------------------


class Copy(_Value, frozen=True, kw_only=True, order=True):
    """A sealed copy: what it is of, where it is, and by which digest it is known."""

    owner: int
    kind: Kind = "data"
    holder: str
    domain: str
    digest: str
    layout_hash: str

    @property
    def item(self) -> Item:
        return self.owner, self.kind


class ParitySet(_Value, frozen=True, kw_only=True, order=True):
    """Members that protect each other: each keeps its shard and one parity block, in rotation."""

    members: tuple[int, ...]
    tolerates: int = 1
    """Members that may be lost, shard and parity block together. XOR: 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.tolerates < len(set(self.members)) or len(set(self.members)) != len(self.members):
            raise CheckpointError(
                f"a parity set of {list(self.members)} that tolerates {self.tolerates}.",
                remedy="Give two or more different members, and fewer losses than members.",
            )


def rebuild_inputs(owner: int, parity: ParitySet, has: Callable[[Item], bool]) -> tuple[Item, ...]:
    """What ``owner``'s shard is rebuilt from: shards and parity blocks of the other members. Empty: it cannot be.

    Two members are each other's mirror: the parity block is the shard. More losses than one (Reed-Solomon) are counted
    by member, which is safe and asks for a little more than the code needs.
    """
    others = [member for member in parity.members if member != owner]
    if len(parity.members) == 2:
        block: Item = (others[0], "parity")
        return (block,) if has(block) else ()
    intact = [m for m in others if has((m, "data")) and has((m, "parity"))]
    if len(intact) < len(parity.members) - parity.tolerates:
        return ()
    return tuple((m, kind) for m in intact for kind in _KINDS)


def domains_of(copies: Iterable[Copy]) -> dict[Item, frozenset[str]]:
    found: dict[Item, frozenset[str]] = {}
    for copy in copies:
        found[copy.item] = found.get(copy.item, frozenset()) | {copy.domain}
    return found


def redundancy(owner: int, domains: Mapping[Item, Collection[str]], parity: ParitySet | None, limit: int) -> int:
    """How many domains must be lost before the shard is, counted up to ``limit``. 0: it is lost already."""
    own = frozenset(domains.get((owner, "data"), ()))
    if parity is None or len(own) >= limit:
        return min(len(own), limit)
    others = sorted({d for m in parity.members for kind in _KINDS for d in domains.get((m, kind), ())} - own)
    for extra in range(limit - len(own)):
        for more in combinations(others, extra):
            lost = own.union(more)
            if not rebuild_inputs(owner, parity, lambda item, lost=lost: bool(set(domains.get(item, ())) - lost)):  # type: ignore[misc]
                return len(own) + extra
    return limit


# -- the log ---------------------------------------------------------------------------------------------------------


class ShardRecord(_Value, frozen=True, kw_only=True, order=True):
    """One shard or parity block of a committed generation, and who held it at that moment."""

    owner: int
    kind: Kind
    digest: str
    layout_hash: str
    holders: tuple[tuple[str, str], ...]
    """(holder, domain), sorted."""


class CommitRecord(_Value, frozen=True, kw_only=True, order=True):
    """A line of the commit log: this generation is whole. Its own digest covers all other fields."""

    generation: int
    step: int
    epoch: int
    copies: int
    """The redundancy that was asked for."""
    degraded: bool
    """Committed at a deadline with less."""
    shards: tuple[ShardRecord, ...]
    sets: tuple[ParitySet, ...] = ()
    digest: str = ""

    @classmethod
    def of(
        cls, generation: int, step: int, epoch: int, *, copies: Iterable[Copy], sets: Sequence[ParitySet] = (),
        wanted: int = 1, degraded: bool = False,
    ) -> CommitRecord:  # fmt: skip
        """Build a record from copies that agree."""
        by_item: dict[Item, list[Copy]] = {}
        for copy in sorted(copies):
            by_item.setdefault(copy.item, []).append(copy)
        shards = tuple(
            ShardRecord(
                owner=owner,
                kind=kind,
                digest=found[0].digest,
                layout_hash=found[0].layout_hash,
                holders=tuple((copy.holder, copy.domain) for copy in found),
            )
            for (owner, kind), found in by_item.items()
        )
        bare = cls(
            generation=generation, step=step, epoch=epoch, copies=wanted, degraded=degraded, shards=shards,
            sets=tuple(sets),
        )  # fmt: skip
        return msgspec.structs.replace(bare, digest=bare.computed_digest())

    def computed_digest(self) -> str:
        return content_digest(msgspec.json.encode(msgspec.structs.replace(self, digest="")))

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(shard.owner for shard in self.shards if shard.kind == "data")

    def all_copies(self) -> frozenset[Copy]:
        return frozenset(
            Copy(owner=s.owner, kind=s.kind, holder=holder, domain=domain, digest=s.digest, layout_hash=s.layout_hash)
            for s in self.shards
            for holder, domain in s.holders
        )

    def set_of(self, owner: int) -> ParitySet | None:
        return next((parity for parity in self.sets if owner in parity.members), None)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def check(self) -> None:
        if self.computed_digest() != self.digest:
            raise IntegrityError(
                f"the commit record of generation {self.generation} does not match its digest.",
                remedy="Take the log of another agent.",
            )


def decode_record(data: bytes) -> CommitRecord:
    """A record out of a log. IntegrityError when any bit of it has changed."""
    try:
        record = msgspec.json.decode(data, type=CommitRecord)
    except (msgspec.DecodeError, CheckpointError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"a commit record cannot be read: {error}.", remedy="Take the log of another agent."
        ) from error
    record.check()
    if record.encode() != data:
        raise IntegrityError(
            f"the commit record of generation {record.generation} is not as it was written.",
            remedy="Take the log of another agent.",
        )
    return record


# -- what happened ---------------------------------------------------------------------------------------------------


class EpochBegan(_Message, frozen=True, kw_only=True):
    """A new world. What older ones left uncommitted never commits; pin first what a recovery wants to read of it."""

    epoch: int
    owners: tuple[int, ...]
    sets: tuple[ParitySet, ...] = ()


class GenerationBegan(_Message, frozen=True, kw_only=True):
    """The caller drew a number from its durable counter: never used before, larger than all others."""

    generation: int
    step: int


class ShardSealed(_Message, frozen=True, kw_only=True):
    """``holder`` has verified and sealed a copy."""

    generation: int
    step: int
    epoch: int
    owner: int
    holder: str
    domain: str
    digest: str
    layout_hash: str
    kind: Kind = "data"


class Confirmed(_Message, frozen=True, kw_only=True):
    """``holder`` has read the commit record and marked what it holds of the generation COMMITTED."""

    generation: int
    holder: str


class Deadline(_Message, frozen=True, kw_only=True):
    """The time for a generation to commit is over."""

    generation: int


class HolderJoined(_Message, frozen=True, kw_only=True):
    """An agent connected and says all that it holds. What was believed of it before is forgotten."""

    holder: str
    domain: str
    holds: tuple[ShardSealed, ...] = ()


class HolderLost(_Message, frozen=True, kw_only=True):
    """An agent is gone with all it held. Messages of its old connection that come later are ignored."""

    holder: str


class Pinned(_Message, frozen=True, kw_only=True):
    """``by`` (a recovery, a flush) reads the generation: it is kept until `Unpinned` by the same."""

    generation: int
    by: str


class Unpinned(_Message, frozen=True, kw_only=True):
    generation: int
    by: str


Event: TypeAlias = (
    EpochBegan | GenerationBegan | ShardSealed | Confirmed | Deadline | HolderJoined | HolderLost | Pinned | Unpinned
)

# -- what to do ------------------------------------------------------------------------------------------------------


class Begin(_Message, frozen=True, kw_only=True):
    """Take the snapshot. No slot with a generation of ``keep`` is written over (`Arena.begin`, at every holder)."""

    generation: int
    step: int
    epoch: int
    keep: tuple[int, ...]


class Commit(_Message, frozen=True, kw_only=True):
    """Append the record to the log of every agent, then tell the holders, which answer `Confirmed`."""

    record: CommitRecord


class Retire(_Message, frozen=True, kw_only=True):
    """A committed generation is no longer needed: a newer one is at least as safe, and its holders know."""

    generation: int


class Abandon(_Message, frozen=True, kw_only=True):
    """A generation never commits: its slots may be written over. An event of the run, not an error."""

    generation: int
    reason: str


class UnderReplicated(_Message, frozen=True, kw_only=True):
    """Owners of the newest committed generation with less redundancy than asked for. Empty: healed."""

    generation: int
    owners: tuple[int, ...]


class Heal(_Message, frozen=True, kw_only=True):
    """Copy or rebuild the item at ``to``, which verifies it against the record and reports `ShardSealed`."""

    generation: int
    owner: int
    to: str
    kind: Kind = "data"


class Disagreement(_Message, frozen=True, kw_only=True):
    """Holders have sealed different bytes as the same shard. Which are right is decided by full redundancy only."""

    generation: int
    owner: int
    digests: tuple[str, ...]


Output: TypeAlias = Begin | Commit | Retire | Abandon | UnderReplicated | Heal | Disagreement
