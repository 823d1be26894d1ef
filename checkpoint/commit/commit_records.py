"""The commit protocol's values: the records of its log, and the events and outputs of its coordinator.

The *redundancy* of a shard is the smallest number of failure domains whose loss leaves it without a source: the number
of distinct domains that hold it whole, plus, in a parity set, what rebuilding adds. So mirrors and parity follow one
rule: ``copies=2`` means "the loss of a single domain does not lose it", however that is achieved.

Rules:

* A copy is identified by its digest, never by its number alone: a checkpoint is (number, step, fencing token), and a
  copy that differs from the record is no copy of it.
* ``layout_hash`` describes one rank's image, so it differs between the owners of a sharded state. It is compared
  between the copies of one owner, and with the record.
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
    "NUMBER_MAX", "Copy", "Kind", "ParitySet", "rebuild_inputs", "redundancy", "domains_of",
    "CommitRecord", "ShardRecord", "decode_record",
    "Event", "CheckpointBegan", "ShardSealed", "Confirmed", "Deadline", "HolderJoined", "HolderLost", "MembershipBegan",
    "Pinned", "Unpinned",
    "Output", "Begin", "Commit", "Retire", "Abandon", "UnderReplicated", "Repair", "Disagreement",
]  # fmt: skip

NUMBER_MAX = 2**63 - 1
"""The largest checkpoint number, which the header of a slot has room for."""
Kind: TypeAlias = Literal["data", "parity"]
Item: TypeAlias = tuple[int, Kind]
"""(owner, kind): a shard, or the parity block that a member of a set keeps."""
_KINDS: tuple[Kind, Kind] = ("data", "parity")


class _Value(msgspec.Struct, frozen=True, kw_only=True, order=True):
    pass


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type", rename={"fencing_token": "epoch"}
):
    pass


# -- copies and sets -------------------------------------------------------------------------------------------------


class Copy(_Value, frozen=True, kw_only=True, order=True):
    """A sealed copy of an item: its owner and kind, where it is, and its digest."""

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
    """Members that protect each other. Each keeps its shard and one parity block, in rotation."""

    members: tuple[int, ...]
    tolerates: int = 1
    """How many members may be lost, with shard and parity block. 1 for XOR."""

    def __post_init__(self) -> None:
        if not 1 <= self.tolerates < len(set(self.members)) or len(set(self.members)) != len(self.members):
            raise CheckpointError(
                f"a parity set of the members {list(self.members)} cannot tolerate {self.tolerates} losses.",
                remedy="Give two or more different members, and fewer losses than members.",
            )


def rebuild_inputs(owner: int, parity: ParitySet, has: Callable[[Item], bool]) -> tuple[Item, ...]:
    """Return the items that ``owner``'s shard is rebuilt from: shards and parity blocks of the other members.

    Empty when it cannot be rebuilt. Two members are each other's mirror: the parity block is the shard. For sets that
    tolerate more than one loss (Reed-Solomon), losses are counted by member, which is safe and asks for a little more
    than the code needs.
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
    """Return item -> the failure domains that hold a copy of it."""
    found: dict[Item, frozenset[str]] = {}
    for copy in copies:
        found[copy.item] = found.get(copy.item, frozenset()) | {copy.domain}
    return found


def redundancy(owner: int, domains: Mapping[Item, Collection[str]], parity: ParitySet | None, limit: int) -> int:
    """Return how many domains must be lost before the shard is lost, counted up to ``limit``. 0: it is lost already."""
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
    """One shard or parity block of a committed checkpoint, and its holders at the time of the commit."""

    owner: int
    kind: Kind
    digest: str
    layout_hash: str
    holders: tuple[tuple[str, str], ...]
    """(holder, domain), sorted."""


class CommitRecord(
    _Value, frozen=True, kw_only=True, order=True, rename={"number": "generation", "fencing_token": "epoch"}
):
    """A line of the commit log, which states that a checkpoint is whole. Its ``digest`` covers all other fields."""

    number: int
    """Checkpoint number; ``generation`` in the encoded record, as decision 12 says."""
    step: int
    fencing_token: int
    copies: int
    """The redundancy that was asked for."""
    degraded: bool
    """Whether it was committed at a deadline with less redundancy than asked for."""
    shards: tuple[ShardRecord, ...]
    sets: tuple[ParitySet, ...] = ()
    digest: str = ""

    @classmethod
    def of(
        cls, number: int, step: int, fencing_token: int, *, copies: Iterable[Copy], sets: Sequence[ParitySet] = (),
        wanted: int = 1, degraded: bool = False,
    ) -> CommitRecord:  # fmt: skip
        """Build a record from copies that agree. ``wanted``: the redundancy asked for."""
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
            number=number, step=step, fencing_token=fencing_token, copies=wanted, degraded=degraded, shards=shards,
            sets=tuple(sets),
        )  # fmt: skip
        return msgspec.structs.replace(bare, digest=bare.computed_digest())

    def computed_digest(self) -> str:
        return content_digest(msgspec.json.encode(msgspec.structs.replace(self, digest="")))

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(shard.owner for shard in self.shards if shard.kind == "data")

    def all_copies(self) -> frozenset[Copy]:
        """Return every copy in the record: each shard or parity block at each of its holders."""
        return frozenset(
            Copy(owner=s.owner, kind=s.kind, holder=holder, domain=domain, digest=s.digest, layout_hash=s.layout_hash)
            for s in self.shards
            for holder, domain in s.holders
        )

    def set_of(self, owner: int) -> ParitySet | None:
        """Return the parity set that ``owner`` belongs to; None when there is none."""
        return next((parity for parity in self.sets if owner in parity.members), None)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def check(self) -> None:
        """Raise IntegrityError when the record does not match its digest."""
        if self.computed_digest() != self.digest:
            raise IntegrityError(
                f"the commit record of checkpoint {self.number} does not match its digest.",
                remedy="Take the log of another agent.",
            )


def decode_record(data: bytes) -> CommitRecord:
    """Decode a record of a commit log. Raises IntegrityError when any bit of it has changed."""
    try:
        record = msgspec.json.decode(data, type=CommitRecord)
    except (msgspec.DecodeError, CheckpointError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"a commit record cannot be read: {error}.", remedy="Take the log of another agent."
        ) from error
    record.check()
    if record.encode() != data:
        raise IntegrityError(
            f"the commit record of checkpoint {record.number} is not as it was written.",
            remedy="Take the log of another agent.",
        )
    return record


# -- events -----------------------------------------------------------------------------------------------------------


class MembershipBegan(_Message, frozen=True, kw_only=True, tag="EpochBegan"):
    """A new membership of the world began. Checkpoints that older memberships left uncommitted never commit.

    Pin beforehand what a recovery wants to read.
    """

    fencing_token: int
    owners: tuple[int, ...]
    sets: tuple[ParitySet, ...] = ()


class CheckpointBegan(_Message, frozen=True, kw_only=True):
    """The caller drew a number from its durable counter: never used before, and larger than all others."""

    number: int
    step: int


class ShardSealed(_Message, frozen=True, kw_only=True):
    """``holder`` has verified and sealed a copy."""

    number: int
    step: int
    fencing_token: int
    owner: int
    holder: str
    domain: str
    digest: str
    layout_hash: str
    kind: Kind = "data"


class Confirmed(_Message, frozen=True, kw_only=True):
    """``holder`` has read the commit record, and marked its slots of the checkpoint as COMMITTED."""

    number: int
    holder: str


class Deadline(_Message, frozen=True, kw_only=True):
    """The time for a checkpoint to commit is over."""

    number: int


class HolderJoined(_Message, frozen=True, kw_only=True):
    """An agent connected and reported all that it holds. Earlier knowledge of it is dropped."""

    holder: str
    domain: str
    holds: tuple[ShardSealed, ...] = ()


class HolderLost(_Message, frozen=True, kw_only=True):
    """An agent is lost with all it held. Later messages of its old connection are ignored."""

    holder: str


class Pinned(_Message, frozen=True, kw_only=True):
    """``by`` (a recovery, a flush) reads the checkpoint, which is kept until `Unpinned` with the same ``by``."""

    number: int
    by: str


class Unpinned(_Message, frozen=True, kw_only=True):
    """``by`` no longer reads the checkpoint."""

    number: int
    by: str


Event: TypeAlias = (
    MembershipBegan
    | CheckpointBegan
    | ShardSealed
    | Confirmed
    | Deadline
    | HolderJoined
    | HolderLost
    | Pinned
    | Unpinned
)

# -- outputs ----------------------------------------------------------------------------------------------------------


class Begin(_Message, frozen=True, kw_only=True):
    """Take the snapshot. No holder may overwrite a slot with a checkpoint of ``keep`` (`Arena.begin`)."""

    number: int
    step: int
    fencing_token: int
    keep: tuple[int, ...]


class Commit(_Message, frozen=True, kw_only=True):
    """Append the record to the log of every agent, then send it to the holders, which answer `Confirmed`."""

    record: CommitRecord


class Retire(_Message, frozen=True, kw_only=True):
    """A committed checkpoint is no longer needed.

    A newer one is at least as safe, and its holders have confirmed it.
    """

    number: int


class Abandon(_Message, frozen=True, kw_only=True):
    """A checkpoint will never commit, and its slots may be overwritten. This is a normal event, not an error."""

    number: int
    reason: str


class UnderReplicated(_Message, frozen=True, kw_only=True):
    """The owners whose shards in the newest committed checkpoint have less redundancy than asked for. Empty: healed."""

    number: int
    owners: tuple[int, ...]


class Repair(_Message, frozen=True, kw_only=True, tag="Heal"):
    """Copy or rebuild the item at ``to``, which verifies it against the record and reports `ShardSealed`."""

    number: int
    owner: int
    to: str
    kind: Kind = "data"


class Disagreement(_Message, frozen=True, kw_only=True):
    """Holders have sealed different bytes as the same shard.

    Only full redundancy of one side decides which bytes are right.
    """

    number: int
    owner: int
    digests: tuple[str, ...]


Output: TypeAlias = Begin | Commit | Retire | Abandon | UnderReplicated | Repair | Disagreement
