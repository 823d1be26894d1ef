"""Choose the checkpoint that a restore takes, and the sources of its shards. Pure.

All ranks take the newest checkpoint for which every shard has a verified source. How near the sources are does not
affect that choice. Each shard then gets a list of its sources, nearest first; a rank tries the next source when one
fails. When a shard runs out of sources, call `choose` again without the holdings that failed: all ranks go back
together.

Rules:

* A holding counts only if it has the record's step, fencing token, digest and layout, and if its holder has verified
  it. "Not verified" is not "bad": verify the holding, and choose again.
* A parity rebuild reads the other members' shards and parity blocks of the *same* checkpoint, each with a source of its
  own. The result is checked against the record like any other source.
* Without a commit record nothing shows that a checkpoint is whole. Only ``best_effort`` reads such a checkpoint, and
  only where every owner's copies were sealed alike. No rebuild is possible then, because no digest is known to check
  it against.
* A quarantined checkpoint was restored and turned out bad. No restore takes it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from rackrun.checkpoint.base.errors import IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.commit.commit_records import CommitRecord, Item, Kind, ParitySet, ShardRecord, rebuild_inputs

__all__ = ["ATTEMPTS_MAX", "Holding", "RestorePlan", "ShardSource", "Tier", "choose"]

ATTEMPTS_MAX = 3
"""How many restores of one checkpoint may end badly before an older one is chosen.

More than one may, because a rank lost during a restore is not the checkpoint's fault.
"""


class Tier(IntEnum):
    """Where the bytes come from, cheapest first."""

    LIVE_PEER = 0
    """The memory of a running replica."""
    OWN_TRAY = 1
    PEER_TRAY = 2
    PARITY = 3
    """Rebuilt from parity; never the tier of a holding."""
    LOCAL_DISK = 4
    SHARED = 5
    """A directory that every tray can read."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, order=True, rename={"fencing_token": "epoch"}):
    """A sealed copy of one shard, or one parity block, as reported by the agent that holds it."""

    number: int
    step: int
    fencing_token: int
    owner: int
    kind: Kind = "data"
    holder: str
    domain: str
    tier: Tier
    digest: str
    layout_hash: str
    verified: bool
    """Whether the holder has checked every chunk, before or after sealing it."""

    @property
    def item(self) -> Item:
        return self.owner, self.kind


class ShardSource(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get a shard. ``inputs``: for a rebuild, one holding for each shard and parity block that it reads."""

    tier: Tier
    holder: str = ""
    inputs: tuple[Holding, ...] = ()


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True, rename={"fencing_token": "epoch"}):
    """What all ranks restore: one checkpoint, and the sources of each shard in the order in which to try them."""

    number: int
    step: int
    fencing_token: int
    committed: bool
    digests: dict[int, str]
    sources: dict[int, tuple[ShardSource, ...]]
    passed_over: dict[int, str]
    """Number of a newer checkpoint -> why it was not taken."""


class _Wanted(NamedTuple):
    """A checkpoint that could be restored: from a commit record, or, if uncommitted, from the inventory."""

    number: int
    step: int
    fencing_token: int
    committed: bool
    shards: tuple[ShardRecord, ...]
    sets: tuple[ParitySet, ...]


def choose(
    inventory: Sequence[Holding],
    commits: Sequence[CommitRecord],
    lost: Collection[str] = (),
    quarantined: Collection[int] = (),
    *,
    attempts: Mapping[int, int] | None = None,
    attempts_max: int = ATTEMPTS_MAX,
    best_effort: bool = False,
    owners: Collection[int] = (),
) -> RestorePlan:
    """Return the plan for the newest checkpoint that can be restored.

    ``lost``: holders that are gone. ``quarantined``: checkpoints that turned out bad. ``attempts``: checkpoint number
    -> failed restores, from the log. ``owners``: the ranks that must be whole in an uncommitted checkpoint; needed by
    ``best_effort``.

    Raises NoUsableCheckpoint, with the reason for each checkpoint, when there is none, and IntegrityError when two
    commit records contradict each other.
    """
    tried = attempts or {}
    alive = sorted(holding for holding in inventory if holding.holder not in lost)
    reasons: dict[int, str] = {}
    for wanted in _candidates(alive, commits, owners if best_effort else ()):
        n = wanted.number
        if n in quarantined:
            reasons[n] = "quarantined: it turned out bad after a restore"
        elif tried.get(n, 0) >= attempts_max:
            reasons[n] = f"{tried[n]} restores of it have failed"
        else:
            sources, missing = _sources(wanted, [holding for holding in alive if holding.number == n], lost)
            if not missing:
                return RestorePlan(
                    number=n, step=wanted.step, fencing_token=wanted.fencing_token, committed=wanted.committed,
                    sources=sources,
                    digests={shard.owner: shard.digest for shard in wanted.shards if shard.kind == "data"},
                    passed_over=reasons,
                )  # fmt: skip
            reasons[n] = "; ".join(missing)
    uncommitted = sorted({holding.number for holding in alive} - set(reasons), reverse=True)
    reasons |= dict.fromkeys(uncommitted, "never committed" + (", and not sealed alike by all" if best_effort else ""))
    story = " ".join(f"Checkpoint {n}: {reasons[n]}." for n in sorted(reasons, reverse=True))
    raise NoUsableCheckpoint(
        f"no checkpoint can be restored. {story or 'Nothing was ever committed.'}",
        remedy="Bring a lost holder back, give a durable directory, or begin anew.",
    )


def _candidates(alive: Sequence[Holding], commits: Sequence[CommitRecord], owners: Collection[int]) -> list[_Wanted]:
    """Return the checkpoints to consider, newest first.

    Uncommitted ones are included only if ``owners`` are given, and only if all owners' copies were sealed alike.
    """
    records: dict[int, CommitRecord] = {}
    for record in commits:
        record.check()
        if records.setdefault(record.number, record) != record:
            raise IntegrityError(
                f"two commit records of checkpoint {record.number} differ: two writers have committed it.",
                remedy=f"keep commit-{record.number:012d}.json of the writer with the larger fencing token, in the job's "
                "folders of the memory tier; move the others away.",
            )
    found = [_Wanted(r.number, r.step, r.fencing_token, True, r.shards, r.sets) for r in records.values()]
    for n in sorted({holding.number for holding in alive} - set(records)) if owners else ():
        data = [holding for holding in alive if holding.number == n and holding.kind == "data"]
        data = [holding for holding in data if holding.owner in owners]
        told = {owner: {(h.digest, h.layout_hash) for h in data if h.owner == owner} for owner in sorted(owners)}
        if len({(h.step, h.fencing_token) for h in data}) == 1 and all(len(said) == 1 for said in told.values()):
            shards = [
                ShardRecord(owner=owner, kind="data", digest=digest, layout_hash=layout_hash, holders=())
                for owner, said in told.items()
                for digest, layout_hash in said
            ]
            found.append(_Wanted(n, data[0].step, data[0].fencing_token, False, tuple(shards), ()))
    return sorted(found, key=lambda wanted: wanted.number, reverse=True)


def _sources(
    wanted: _Wanted, holdings: Sequence[Holding], lost: Collection[str]
) -> tuple[dict[int, tuple[ShardSource, ...]], list[str]]:
    """Return each shard's sources, nearest first, and a sentence for each shard that has none."""
    identity = wanted.step, wanted.fencing_token
    records = {(shard.owner, shard.kind): shard for shard in wanted.shards}
    copies: dict[Item, list[Holding]] = {}
    unfit: dict[Item, list[str]] = {}
    for holding in holdings:
        record = records.get(holding.item)
        if record is None:
            continue
        if (holding.step, holding.fencing_token) != identity:
            why = f"is of step {holding.step}, fencing token {holding.fencing_token}"
        elif (holding.digest, holding.layout_hash) != (record.digest, record.layout_hash):
            why = "differs from the record"
        elif not holding.verified:
            why = "is not verified"
        else:
            copies.setdefault(holding.item, []).append(holding)
            continue
        unfit.setdefault(holding.item, []).append(f"{holding.holder}'s {why}")
    for found in copies.values():
        found.sort(key=lambda holding: (holding.tier, holding.holder))

    sources: dict[int, tuple[ShardSource, ...]] = {}
    missing: list[str] = []
    for owner, kind in records:
        if kind != "data":
            continue
        plain = [ShardSource(tier=holding.tier, holder=holding.holder) for holding in copies.get((owner, "data"), ())]
        parity = next((found for found in wanted.sets if owner in found.members), None)
        ordered = sorted([*plain, *_rebuild(owner, parity, copies)], key=lambda source: source.tier)
        sources[owner] = tuple(ordered)
        if not ordered:
            missing.append(_story(records[owner, "data"], unfit.get((owner, "data"), []), lost, parity is not None))
    return sources, missing


def _rebuild(owner: int, parity: ParitySet | None, copies: Mapping[Item, Sequence[Holding]]) -> list[ShardSource]:
    """Return the rebuild of ``owner``'s shard as a source; empty when too many members are missing."""
    needed = rebuild_inputs(owner, parity, lambda item: bool(copies.get(item))) if parity else ()
    return [ShardSource(tier=Tier.PARITY, inputs=tuple(copies[item][0] for item in needed))] if needed else []


def _story(record: ShardRecord, unfit: Sequence[str], lost: Collection[str], in_set: bool) -> str:
    held = [f"{holder} ({domain}{', lost' if holder in lost else ''})" for holder, domain in record.holders]
    story = f"the shard of rank {record.owner} has no source; held by {', '.join(held) or 'nobody known'}"
    if unfit:
        story += f"; {', '.join(unfit)}"
    return story + ("; its parity set is not complete" if in_set else "")
