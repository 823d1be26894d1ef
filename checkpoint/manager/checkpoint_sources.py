"""List what this rank could restore from: the arenas it can open, and the durable checkpoints in the directory.

Memory and disk are described by the same `Holding` records, so that `choose` compares them. A durable shard is
identified by the digest of the sealed image it was written from. The digest is computed from the checksums in the
shard's fragment, or read from the fragment where replicas shared the writing. A shard on disk can therefore replace a
damaged one in memory, within one checkpoint.

A durable checkpoint whose commit record is gone (the host's memory was lost) gets one from its manifest: the manifest
was written after the commit, so it proves the commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_folder import ArenaFolder
from rackrun.checkpoint.arena.arena_format import SlotHeader, SlotState, manifest_digest, table_bytes
from rackrun.checkpoint.arena.arena_slot import SlotInfo, SlotReader
from rackrun.checkpoint.base.errors import CheckpointError, NotOurs, NoUsableCheckpoint, is_damage
from rackrun.checkpoint.base.messages import say
from rackrun.checkpoint.commit.checkpoint_choice import Holding, RestorePlan, Tier
from rackrun.checkpoint.commit.commit_records import CommitRecord, Copy
from rackrun.checkpoint.durable.durable_manifest import Manifest
from rackrun.checkpoint.durable.durable_reader import CheckpointReader, ShardReader
from rackrun.checkpoint.durable.durable_store import CheckpointInfo, DurableStore

__all__ = ["DISK", "RestorableData", "ShardBytes", "Sources", "identity_of", "newest_records"]

DISK = "disk"


class RestorableData(msgspec.Struct, frozen=True, kw_only=True, rename={"newest_fencing_token": "newest_epoch"}):
    """What one rank can restore from."""

    place: str = ""
    """Identifies the host and folder of the arenas. Ranks with the same place see the same arenas."""
    holdings: tuple[Holding, ...] = ()
    """The shards in memory, verified. Each arena is verified by one of the ranks that see it."""
    records: tuple[CommitRecord, ...] = ()
    durable: tuple[tuple[int, str], ...] = ()
    """(checkpoint number, digest of its manifest), newest first."""
    left_out: dict[int, str] = {}
    """Checkpoint number -> why it cannot be used, although something of it exists.

    Key -1: the directory cannot even be listed.
    """
    damaged: tuple[int, ...] = ()
    """The checkpoints of ``left_out`` whose bytes on disk are wrong or missing.

    The state of the others is not known.
    """
    newest_number: int = -1
    newest_fencing_token: int = -1


class Sources:
    """The arenas and durable checkpoints that this rank has opened for one restore."""

    def __init__(self, folder: ArenaFolder | None, store: DurableStore, *, rank: int, world: int) -> None:
        self._folder, self._store = folder, store
        self._rank, self._world = rank, world
        self._arenas: dict[tuple[int, int], tuple[Arena, SlotReader]] = {}
        """(checkpoint number, owner) -> the arena that holds the shard, and a reader of its slot."""
        self._opened: list[Arena] = []
        self._durable: dict[int, CheckpointReader] = {}

    def look(self) -> RestorableData:
        """Return what this rank can restore from, after verifying every byte of the arenas assigned to it.

        Damage is left out and recorded, not raised.
        """
        durable: list[CheckpointInfo] = []
        left_out: dict[int, str] = {}
        damaged: tuple[int, ...] = ()
        foreign: set[int] = set()
        try:
            self._store.complete()
            durable, unusable = self._store.look()
            left_out = {n: str(why) for n, why in unusable.items()}
            damaged = tuple(n for n, why in unusable.items() if is_damage(why))
            foreign = {n for n, why in unusable.items() if isinstance(why, NotOurs)}
        except CheckpointError as error:
            left_out = {-1: str(error)}
        records, unreadable = self._folder.commits() if self._folder is not None else ([], {})
        left_out = {**unreadable, **left_out}
        known = [*(info.number for info in durable), *(record.number for record in records), *({*left_out} - foreign)]
        newest = max(known, default=-1)  # lost checkpoints count too
        fencing_token = max((info.fencing_token for info in durable), default=-1)
        holdings: list[Holding] = []
        for arena, mine in self._visible():
            fencing_token = max(fencing_token, arena.fencing_token)
            for info in arena.slots():
                newest = max(newest, info.number)
                if info.state not in (SlotState.SEALED, SlotState.COMMITTED) or info.kind != "data":
                    continue
                try:
                    reader = arena.reader(info.number, owner=info.owner)
                    if mine:
                        reader.verify()
                except CheckpointError as error:
                    say(error.what)
                    continue
                self._arenas[info.number, info.owner] = arena, reader
                if mine:
                    holdings.append(_in_memory(info, self.place))
                if info.state is SlotState.COMMITTED and all(info.number != one.number for one in records):
                    left_out.setdefault(info.number, "it was committed in memory, and its commit record is gone.")
        return RestorableData(
            place=self.place,
            holdings=tuple(holdings),
            records=tuple(records),
            durable=tuple((info.number, info.digest) for info in durable),
            left_out=left_out,
            damaged=damaged,
            newest_number=newest,
            newest_fencing_token=fencing_token,
        )

    @property
    def place(self) -> str:
        return self._folder.place if self._folder is not None else ""

    def on_disk(self, common: set[tuple[int, str]]) -> tuple[list[Holding], list[CommitRecord]]:
        """Return the shards and commit records of all checkpoints in ``common`` that can be read (see `look_into`)."""
        holdings, records = list[Holding](), list[CommitRecord]()
        for number, _ in sorted(common):
            with contextlib.suppress(CheckpointError):
                found, record = self.look_into(number)
                holdings += found
                records.append(record)
        return holdings, records

    def look_into(self, number: int) -> tuple[list[Holding], CommitRecord]:
        """Return the shards of a durable checkpoint and a commit record of it.

        Raises CheckpointError when it cannot be read.
        """
        holdings = _durable_holdings(self._reader(number))
        copies = [
            Copy(owner=h.owner, holder=DISK, domain=DISK, digest=h.digest, layout_hash=h.layout_hash) for h in holdings
        ]
        return holdings, CommitRecord.of(number, holdings[0].step, holdings[0].fencing_token, copies=copies)

    def shard(self, plan: RestorePlan, owner: int) -> ShardBytes:
        """Return the bytes of ``owner``'s shard, from the first source of the plan that this rank can open.

        Raises the reader's error when the shard in the directory cannot be opened, and `NoUsableCheckpoint` when this
        rank reaches no source.
        """
        for source in plan.sources[owner]:
            if source.tier is Tier.OWN_TRAY and source.holder == self.place and (plan.number, owner) in self._arenas:
                return ShardBytes(Tier.OWN_TRAY, self._arenas[plan.number, owner][1], None)
            if source.tier is Tier.SHARED:
                return ShardBytes(Tier.SHARED, None, (self._reader(plan.number), owner))
        raise NoUsableCheckpoint(
            f"rank {self._rank} reaches no copy of the shard of rank {owner} in checkpoint {plan.number}.",
            remedy="write durable checkpoints: memory is read on its own host only.",
        )

    def close(self) -> None:
        self._arenas.clear()
        for arena in self._opened:
            arena.close()
        self._opened.clear()
        for reader in self._durable.values():
            reader.close()
        self._durable.clear()

    def _visible(self) -> list[tuple[Arena, bool]]:
        """Return the arenas this rank can open, each with whether this rank is the one to verify it."""
        found = []
        for path, (rank, _) in self._folder.arenas().items() if self._folder is not None else ():
            if self._folder is not None and (arena := self._folder.attach(path)) is not None:
                self._opened.append(arena)
                found.append((arena, rank % self._world == self._rank))
        return found

    def _reader(self, number: int) -> CheckpointReader:
        if number not in self._durable:
            self._durable[number] = self._store.open(number)
        return self._durable[number]


class ShardBytes:
    """The verified bytes of one shard, read from memory or from disk."""

    def __init__(self, tier: Tier, memory: SlotReader | None, disk: tuple[CheckpointReader, int] | None) -> None:
        self.tier = tier
        self._memory, self._disk = memory, disk

    @property
    def size(self) -> int:
        if self._memory is not None:
            return len(self._memory.payload)
        assert self._disk is not None
        return self._disk[0].reader(self._disk[1]).size

    def read(self, start: int, stop: int) -> memoryview:
        """Return verified bytes of the shard. Raises IntegrityError when bytes on disk are wrong."""
        if self._memory is not None:
            return self._memory.payload[start:stop]  # verified by `Sources.look`
        assert self._disk is not None
        return self._disk[0].read(self._disk[1], start, stop)


def newest_records(told: Iterable[CommitRecord]) -> list[CommitRecord]:
    """Return one record for each checkpoint: the one with the largest fencing token."""
    found: dict[int, CommitRecord] = {}
    for record in sorted(told, key=lambda record: record.fencing_token):
        found[record.number] = record
    return list(found.values())


def _in_memory(info: SlotInfo, place: str) -> Holding:
    return Holding(
        number=info.number, step=info.step, fencing_token=info.fencing_token, owner=info.owner, holder=place,
        domain=place,
        tier=Tier.OWN_TRAY, digest=info.manifest_digest, layout_hash=info.layout_hash, verified=True,
    )  # fmt: skip


def _durable_holdings(reader: CheckpointReader) -> list[Holding]:
    """Return the shards of a durable checkpoint. Their bytes count as verified because each read verifies them."""
    manifest = reader.manifest
    found = []
    for rank in range(manifest.world_size):
        digest, layout_hash = identity_of(manifest, reader.reader(rank))
        found.append(
            Holding(
                number=manifest.number, step=manifest.step, fencing_token=manifest.fencing_token, owner=rank,
                holder=DISK,
                domain=DISK, tier=Tier.SHARED, digest=digest, layout_hash=layout_hash, verified=True,
            )
        )  # fmt: skip
    return found


def identity_of(manifest: Manifest, shard: ShardReader) -> tuple[str, str]:
    """Return the digest and the layout hash of the sealed image that a shard on disk equals, or is a share of."""
    header = SlotHeader(
        b"", 0, kind="data", number=manifest.number, step=manifest.step, owner=shard.rank,
        payload_bytes=shard.size, layout_hash=shard.layout_hash,
    )  # fmt: skip
    digest = manifest_digest(header, shard.chunk_bytes, table_bytes(shard.crcs)).hex()
    return shard.share_of or (digest, shard.layout_hash)
