"""The coordinator of the commit protocol: it decides when a checkpoint is whole, and when an older one may go.

``handle(event) -> outputs``, pure. A checkpoint commits when every owner's shard has the requested redundancy, counting
copies of one (number, step, fencing token) with one digest for each shard. A newer checkpoint retires an older one only
when the newer one's own holders have confirmed the commit record, and it is at least as safe as the older still is.
Until then both are kept.

The rules that keep a commit true:

* A holder overwrites nothing that may still commit: `Begin.keep` lists it. So a checkpoint is known here from
  `CheckpointBegan` on, before anyone seals it, and a checkpoint not known here never commits.
* A checkpoint that cannot commit any more (its deadline passed, a newer one committed, a new membership began) first
  leaves ``keep`` and is then refused, within one call.
* A degraded commit keeps the older checkpoint until the newer is healed, or until the older is no safer.

What callers must know:

* Fencing tokens fence writers, not bytes: a copy of an *already committed* checkpoint counts under any token if it
  matches the record. That is how healing works after a recovery.
* After a restart of the coordinator, the holders in the records are trusted until they connect (`HolderJoined` lists
  what they really hold) or are given up (send `HolderLost` for each one that does not come). They are not assumed to
  have confirmed: send the records of `committed` to everyone who connects or has healed. Pins are not in the log: pin
  again first.
* With two slots for each arena, a snapshot finds no room while two checkpoints are kept: begin when `keep` has room.
  That is the price of I1; a snapshot that found no room ends in `Abandon` at its deadline, and the older one is never
  lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import assert_never

import msgspec

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, StaleFencingToken
from rackrun.checkpoint.commit.commit_records import (
    Abandon,
    Begin,
    CheckpointBegan,
    Commit,
    CommitRecord,
    Confirmed,
    Copy,
    Deadline,
    Disagreement,
    Event,
    HolderJoined,
    HolderLost,
    Item,
    MembershipBegan,
    Output,
    ParitySet,
    Pinned,
    Repair,
    Retire,
    ShardSealed,
    UnderReplicated,
    Unpinned,
    decode_record,
    domains_of,
    redundancy,
)

__all__ = [
    "Abandon", "Begin", "Commit", "CommitPolicy", "CommitRecord", "Committer", "Confirmed", "Deadline", "Disagreement",
    "MembershipBegan", "Event", "CheckpointBegan", "Repair", "HolderJoined", "HolderLost", "Output", "ParitySet",
    "Pinned",
    "Retire", "ShardSealed", "UnderReplicated", "Unpinned", "decode_record",
]  # fmt: skip


class CommitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The redundancy that commits need.

    ``copies``: redundancy of a commit. ``min_copies``: the redundancy that is enough at the deadline; None: ``copies``.
    """

    copies: int = 2
    min_copies: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.floor <= self.copies:
            raise CheckpointError(
                f"copies={self.copies} and min_copies={self.min_copies} cannot be used together.",
                remedy="Use 1 <= min_copies <= copies.",
            )

    @property
    def floor(self) -> int:
        return self.copies if self.min_copies is None else self.min_copies


class Committer:
    """The commit state of one job. Its tables hold immutable values, so copying the tables copies the state."""

    def __init__(self, policy: CommitPolicy, log: Sequence[CommitRecord] = ()) -> None:
        """Start from the records of earlier runs: ``log`` holds the checkpoints that are not known to be retired.

        Raises IntegrityError when a record is damaged, or two records of one checkpoint differ.
        """
        self.policy = policy
        self.fencing_token = -1
        self.owners: tuple[int, ...] = ()
        self.sets: tuple[ParitySet, ...] = ()
        self.newest_known = -1
        """The largest checkpoint number seen."""
        self.committed: dict[int, CommitRecord] = {}
        self._open: dict[int, int] = {}
        """Number of a checkpoint of this fencing token that may still commit -> its step."""
        self._copies: dict[int, frozenset[Copy]] = {}
        """Number of a checkpoint, open or committed -> its copies at holders that are not lost."""
        self._confirmed: dict[int, frozenset[str]] = {}
        self._domain: dict[str, str] = {}
        self._lost: frozenset[str] = frozenset()
        self._pins: frozenset[tuple[int, str]] = frozenset()
        self._healing: dict[int, frozenset[tuple[Item, str]]] = {}
        self._under: dict[int, tuple[int, ...]] = {}
        self._disagreed: frozenset[tuple[int, int, tuple[str, ...]]] = frozenset()
        for record in log:
            record.check()
            if self.committed.setdefault(record.number, record) != record:
                raise IntegrityError(
                    f"two commit records of checkpoint {record.number} differ: two coordinators have committed it.",
                    remedy="keep the records of the coordinator with the larger fencing token; move the others away.",
                )
            self._copies[record.number] = record.all_copies()
            self._domain |= {copy.holder: copy.domain for copy in record.all_copies()}
            self.newest_known = max(self.newest_known, record.number)
            self.fencing_token = max(self.fencing_token, record.fencing_token)

    @property
    def newest(self) -> CommitRecord | None:
        """The record of the newest committed checkpoint; None when there is none."""
        return self.committed[max(self.committed)] if self.committed else None

    def keep(self) -> tuple[int, ...]:
        """Return the numbers of the checkpoints that no slot may lose: committed and not retired, pinned, or still
        able to commit."""
        pinned = (number for number, _ in self._pins)
        return tuple(sorted({*self.committed, *self._open, *pinned}))

    def handle(self, event: Event) -> list[Output]:
        """Apply one event and return what is to be done.

        Raises `StaleFencingToken` or `CheckpointError` for an impossible event.
        """
        match event:
            case MembershipBegan():
                return self._membership_began(event)
            case CheckpointBegan():
                return self._checkpoint_began(event)
            case ShardSealed():
                return self._shard_sealed(event)
            case Confirmed():
                return self._was_confirmed(event)
            case Deadline():
                return self._deadline(event.number)
            case HolderJoined():
                return self._holder_joined(event)
            case HolderLost():
                return self._holder_lost(event.holder)
            case Pinned() | Unpinned():
                pin = event.number, event.by
                self._pins = self._pins | {pin} if isinstance(event, Pinned) else self._pins - {pin}
                return self._retire()
            case _:
                assert_never(event)

    # -- events --

    def _membership_began(self, event: MembershipBegan) -> list[Output]:
        if event.fencing_token < self.fencing_token or (
            event.fencing_token == self.fencing_token and self.owners not in ((), event.owners)
        ):
            raise StaleFencingToken(
                f"fencing token {event.fencing_token} of owners {list(event.owners)} came after {self.fencing_token}.",
                remedy="Another coordinator is ahead: stop this one.",
            )
        repeated = event.fencing_token == self.fencing_token
        self.fencing_token, self.owners, self.sets = event.fencing_token, event.owners, event.sets
        return [] if repeated else self._abandon(self._open, f"fencing token {event.fencing_token} began")

    def _checkpoint_began(self, event: CheckpointBegan) -> list[Output]:
        if event.number <= self.newest_known or not self.owners:
            raise CheckpointError(
                f"checkpoint {event.number} of token {self.fencing_token} began after checkpoint {self.newest_known}.",
                remedy="Draw numbers from one durable counter, after the membership has begun.",
            )
        self.newest_known = event.number
        keep = self.keep()
        self._open[event.number] = event.step
        self._copies[event.number] = frozenset()
        return [Begin(number=event.number, step=event.step, fencing_token=self.fencing_token, keep=keep)]

    def _shard_sealed(self, event: ShardSealed) -> list[Output]:
        if not self._counts(event):
            return []
        if event.number in self.committed:
            return self._care() + self._retire()
        return self._try_commit(event.number, self.policy.copies)

    def _counts(self, event: ShardSealed) -> bool:
        """Record a sealed copy if it is of a committed checkpoint, or of one that may commit. Return whether it is."""
        if event.holder in self._lost:
            return False
        copy = Copy(
            owner=event.owner, kind=event.kind, holder=event.holder, domain=event.domain, digest=event.digest,
            layout_hash=event.layout_hash,
        )  # fmt: skip
        n = event.number
        self._domain.setdefault(event.holder, event.domain)
        if record := self.committed.get(n):
            known = {(s.owner, s.kind, s.digest, s.layout_hash) for s in record.shards}
            same = (event.step, event.fencing_token) == (record.step, record.fencing_token)
            if not same or (copy.owner, copy.kind, copy.digest, copy.layout_hash) not in known:
                return False
            self._healing[n] = self._healing.get(n, frozenset()) - {(copy.item, copy.holder)}
        elif (event.fencing_token, event.step) != (
            self.fencing_token,
            self._open.get(n),
        ) or event.owner not in self.owners:
            return False
        self._copies[n] |= {copy}
        return True

    def _was_confirmed(self, event: Confirmed) -> list[Output]:
        if event.number not in self.committed or event.holder in self._lost:
            return []
        self._confirmed[event.number] = self._confirmed.get(event.number, frozenset()) | {event.holder}
        return self._retire()

    def _deadline(self, number: int) -> list[Output]:
        if number not in self._open:
            return []
        outputs = self._try_commit(number, self.policy.floor)
        if number in self._open:
            agreed = domains_of(_agreed(self._copies[number], self.policy.copies)[0])
            short = [o for o in self.owners if self._level(o, agreed, self.sets) < self.policy.floor]
            outputs += self._abandon([number], f"too few copies at the deadline of the shards of ranks {short}")
        return outputs

    def _holder_joined(self, event: HolderJoined) -> list[Output]:
        self._forget(event.holder)
        self._lost -= {event.holder}
        self._domain[event.holder] = event.domain
        for sealed in event.holds:
            self._counts(sealed)
        return self._reconsider()

    def _holder_lost(self, holder: str) -> list[Output]:
        self._lost |= {holder}
        self._forget(holder)
        return self._reconsider()

    def _forget(self, holder: str) -> None:
        """Drop all that is known of a holder."""
        self._domain.pop(holder, None)
        for n, copies in self._copies.items():
            self._copies[n] = frozenset(copy for copy in copies if copy.holder != holder)
        for n, confirmed in self._confirmed.items():
            self._confirmed[n] = confirmed - {holder}
        for n, healing in self._healing.items():
            self._healing[n] = frozenset(heal for heal in healing if heal[1] != holder)

    def _reconsider(self) -> list[Output]:
        # A lost holder may have been the one with the differing copy.
        commits = [self._try_commit(n, self.policy.copies) for n in sorted(self._open)]
        return [*chain.from_iterable(commits), *self._care(), *self._retire()]

    # -- committing --

    def _try_commit(self, n: int, wanted: int) -> list[Output]:
        """Try to commit checkpoint ``n`` with redundancy ``wanted``. Report new disagreements between holders."""
        if n not in self._open:
            return []
        copies, disputed = _agreed(self._copies[n], self.policy.copies)
        outputs: list[Output] = []
        for owner, digests in disputed:
            if (n, owner, digests) not in self._disagreed:
                self._disagreed |= {(n, owner, digests)}
                outputs.append(Disagreement(number=n, owner=owner, digests=digests))
        domains = domains_of(copies)
        present = all((owner, "data") in domains for owner in self.owners)
        # A record needs every digest, so every shard must have been sealed, even where parity could rebuild one.
        if not present or any(self._level(owner, domains, self.sets) < wanted for owner in self.owners):
            return outputs
        level = min(self._level(owner, domains, self.sets) for owner in self.owners)
        record = CommitRecord.of(
            n, self._open.pop(n), self.fencing_token, copies=copies, sets=self.sets, wanted=self.policy.copies,
            degraded=level < self.policy.copies,
        )  # fmt: skip
        self.committed[n] = record
        self._copies[n] = copies
        outputs.append(Commit(record=record))
        outputs += self._abandon([o for o in self._open if o < n], f"checkpoint {n} committed before it")
        return outputs + self._care()

    def _abandon(self, numbers: Iterable[int], reason: str) -> list[Output]:
        gone = sorted(numbers)
        for n in gone:
            del self._open[n], self._copies[n]
        return [Abandon(number=n, reason=reason) for n in gone]

    # -- retiring --

    def _retire(self) -> list[Output]:
        """Retire every checkpoint that a newer one replaces without loss of safety.

        Of the newer one, only copies at holders that have confirmed it count.
        """
        outputs: list[Output] = []
        pinned = {number for number, _ in self._pins}
        for old in sorted(self.committed):
            if old not in pinned and any(self._replaces(new, old) for new in self.committed if new > old):
                for table in (self.committed, self._copies, self._confirmed, self._healing, self._under):
                    table.pop(old, None)
                outputs.append(Retire(number=old))
        return outputs

    def _replaces(self, new: int, old: int) -> bool:
        """Whether the confirmed copies of ``new`` are at least as safe as what is left of ``old``."""
        confirmed = self._confirmed.get(new, frozenset())
        sure = self._safety(new, frozenset(copy for copy in self._copies[new] if copy.holder in confirmed))
        return sure >= max(1, self._safety(old, self._copies[old]))

    def _safety(self, n: int, copies: frozenset[Copy]) -> int:
        """Return the smallest redundancy of any shard of checkpoint ``n``, at most the policy's ``copies``."""
        record, domains = self.committed[n], domains_of(copies)
        return min(self._level(owner, domains, record.sets) for owner in record.owners)

    def _level(self, owner: int, domains: dict[Item, frozenset[str]], sets: tuple[ParitySet, ...]) -> int:
        parity = next((found for found in sets if owner in found.members), None)
        return redundancy(owner, domains, parity, self.policy.copies)

    # -- healing --

    def _care(self) -> list[Output]:
        """For the newest committed checkpoint, report the owners short of copies, and order the missing copies."""
        record = self.newest
        if record is None:
            return []
        n, domains = record.number, domains_of(self._copies[record.number])
        levels = {owner: self._level(owner, domains, record.sets) for owner in record.owners}
        under = tuple(owner for owner, level in levels.items() if level < self.policy.copies)
        outputs: list[Output] = []
        if under != self._under.get(n, ()):
            self._under[n] = under
            outputs.append(UnderReplicated(number=n, owners=under))
        for owner in under:
            if levels[owner]:
                outputs += [heal for item in self._missing(record, owner) for heal in self._heal(record, item)]
        return outputs

    def _missing(self, record: CommitRecord, owner: int) -> list[Item]:
        """Return the items that would make a shard safe again: those its parity set lacks, else another copy of it."""
        held = {copy.item for copy in self._copies[record.number]}
        parity = record.set_of(owner)
        items: list[Item] = [s for m in parity.members for s in ((m, "data"), (m, "parity"))] if parity else []
        recorded = {(shard.owner, shard.kind) for shard in record.shards}
        return [item for item in items if item not in held and item in recorded] or [(owner, "data")]

    def _heal(self, record: CommitRecord, item: Item) -> list[Output]:
        """Order the missing copies of an item, each at the holder in a free domain that holds the least."""
        n = record.number
        copies, healing = self._copies[n], self._healing.get(n, frozenset())
        places = {(copy.item, copy.holder) for copy in copies} | healing
        mine = {holder for found, holder in places if found == item}
        parity = record.set_of(item[0])
        lacking = self.policy.copies - len({self._domain.get(holder) for holder in mine})
        if parity and mine <= {holder for found, holder in healing if found == item} and mine:
            return []  # being healed already
        if parity and item not in {copy.item for copy in copies}:
            lacking = 1
        near = {m for m in parity.members if m != item[0]} if parity else set()
        outputs: list[Output] = []
        for _ in range(lacking):
            taken = {self._domain.get(holder) for holder in mine}
            ranked = sorted(
                (
                    sum(i[0] in near and self._domain.get(h) == domain for i, h in places),
                    not any(i[0] == item[0] and h == holder for i, h in places),
                    sum(h == holder for _, h in places),
                    holder,
                )
                for holder, domain in self._domain.items()
                if domain not in taken
            )
            if not ranked:
                break
            to = ranked[0][-1]
            mine |= {to}
            places |= {(item, to)}
            outputs.append(Repair(number=n, owner=item[0], kind=item[1], to=to))
            self._healing[n] = self._healing.get(n, frozenset()) | {(item, to)}
        return outputs


def _agreed(copies: frozenset[Copy], wanted: int) -> tuple[frozenset[Copy], tuple[tuple[int, tuple[str, ...]], ...]]:
    """Return the copies that agree, and (owner, digests) of the shards whose copies do not.

    Where bytes differ, one side counts if it alone has ``wanted`` domains; otherwise neither does. A holder that has
    reported two digests for one item is not counted for that item.
    """
    by_item: dict[Item, dict[tuple[str, str], frozenset[Copy]]] = {}
    for copy in sorted(copies):
        sides = by_item.setdefault(copy.item, {})
        key = copy.digest, copy.layout_hash
        sides[key] = sides.get(key, frozenset()) | {copy}
    good: frozenset[Copy] = frozenset()
    disputed: list[tuple[int, tuple[str, ...]]] = []
    for (owner, _), sides in by_item.items():
        if len(sides) == 1:
            good = good.union(*sides.values())
            continue
        disputed.append((owner, tuple(sorted({digest for digest, _ in sides}))))
        voices = [copy.holder for side in sides.values() for copy in side]
        sound = [frozenset(copy for copy in side if voices.count(copy.holder) == 1) for side in sides.values()]
        full = [side for side in sound if len({copy.domain for copy in side}) >= wanted]
        if len(full) == 1:
            good |= full[0]
    return good, tuple(disputed)
