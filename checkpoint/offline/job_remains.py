"""Read what is left of a job that is gone: arenas and commit records in memory, shards on disk.

A shard counts as found when its bytes were read and are those that were committed, by the digest in the commit record.
Where no record is left, the manifest on disk counts, which was written after the commit.

Parity is not used: a manager keeps none, and agents' parity of snapshots is gone with the agents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_folder import commits_in, keepers_in
from rackrun.checkpoint.arena.arena_slot import SlotInfo, SlotReader
from rackrun.checkpoint.arena.orphans import ArenaState, FoundArena, find_arenas
from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, NotOurs
from rackrun.checkpoint.commit.commit_records import CommitRecord
from rackrun.checkpoint.durable.durable_manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    checkpoint_number,
    unseal,
)
from rackrun.checkpoint.durable.durable_reader import ShardReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.storage.files import read_small
from rackrun.checkpoint.manager.checkpoint_sources import identity_of, newest_records

__all__ = ["VerifiedShard", "Remains", "CommittedCheckpoint", "identities"]

Identity = tuple[str, str]
"""(digest of a sealed image, its layout hash)."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint as it was committed."""

    number: int
    step: int
    fencing_token: int
    shards: tuple[Identity | None, ...]
    """The identity of each rank's shard; None when nothing says what it was."""


@dataclass(frozen=True)
class VerifiedShard:
    """One rank's shard, verified."""

    where: str
    reader: SlotReader | Callable[[], ShardReader]
    """A reader of a shard in memory, or a function that opens one on disk."""
    identity: Identity
    chunk_bytes: int
    bytes: int


class Remains:
    """What is left of the job of ``store``: its checkpoints on disk, and the arenas below ``folders``.

    As a context manager it closes the arenas it has opened.
    """

    def __init__(self, store: DurableStore, folders: Sequence[Path], *, gone: bool = False) -> None:
        """Open the arenas. ``gone``: the job is gone, even if an arena names a process in another container.

        Raises CheckpointError when the job is alive.
        """
        self.store = store
        self.unused: dict[Path, str] = {}
        """Arena -> why it is not read."""
        self._open = contextlib.ExitStack()
        self._slots: list[tuple[Path, Arena, SlotInfo]] = []
        found = {one.path: one for folder in folders for one in find_arenas(folder) if one.job in ("", store.job)}
        self._gone, self._places = gone, sorted({path.parent for path in found} | set(folders))
        if not gone:
            _check_unused(found.values())
        self.check_gone()
        for one in found.values():
            try:
                arena = self._open.enter_context(Arena.attach(one.path, job=store.job))
                self._slots += [(one.path, arena, info) for info in arena.slots()]
            except CheckpointError as error:
                self.unused[one.path] = error.what
        records = newest_records(record for place in self._places for record in commits_in(place)[0])
        self._records = {record.number: record for record in records}
        self.arenas = len(found) - len(self.unused)

    def check_gone(self) -> None:
        """Raise CheckpointError when a process of the job has come back."""
        for place in () if self._gone else self._places:
            if (alive := next((keeper for keeper in keepers_in(place) if keeper.alive()), None)) is not None:
                raise _in_use(place, f"{alive} would come back for it")

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints that were committed in memory, or are on disk in any state; newest first."""
        on_disk: list[int | None] = []
        with contextlib.suppress(OSError):
            on_disk = [checkpoint_number(name) for name in self.store.files.listdir(self.store.directory)]
        ours = (number for number in on_disk if number is not None and self._is_ours(number))
        return sorted({*self._records, *ours}, reverse=True)

    def sought(self, number: int) -> CommittedCheckpoint:
        """Return a checkpoint as it was committed.

        Raises IntegrityError when neither a record nor a manifest can be read.
        """
        if (record := self._records.get(number)) is not None:
            return _recorded(record)
        manifest = self._manifest(number)
        return CommittedCheckpoint(number, manifest.step, manifest.fencing_token, identities(self.store, manifest))

    def find(self, sought: CommittedCheckpoint) -> tuple[dict[int, VerifiedShard], dict[int, str]]:
        """Return rank -> its shard, from memory where possible; and rank -> why no verified shard was found."""
        found: dict[int, VerifiedShard] = {}
        missing: dict[int, str] = {}
        for rank, identity in enumerate(sought.shards):
            if identity is None:
                missing[rank] = "Nothing that can be read says what was committed."
                continue
            reasons = []
            for look in (self._in_memory, self._whole_on_disk):
                try:
                    found[rank] = look(sought, rank, identity)
                    break
                except CheckpointError as error:
                    reasons.append(error.what)
            else:
                missing[rank] = " ".join(reasons)
        return found, missing

    def __enter__(self) -> Remains:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    # -- one shard
    def _in_memory(self, sought: CommittedCheckpoint, rank: int, identity: Identity) -> VerifiedShard:
        reasons = []
        for path, arena, info in self._slots:
            if (info.number, info.owner, info.kind, info.step) != (sought.number, rank, "data", sought.step):
                continue
            try:
                if (info.manifest_digest, info.layout_hash) != identity:
                    raise IntegrityError("It is not what was committed.")
                reader = arena.reader(info.number, owner=rank)
                reader.verify()
                return VerifiedShard(str(path), reader, identity, arena.chunk_bytes, len(reader.payload))
            except CheckpointError as error:
                reasons.append(f"{path}: {error.what}")
        raise CheckpointError(" ".join(reasons) or f"no arena holds rank {rank}'s shard of step {sought.step}.")

    def _whole_on_disk(self, sought: CommittedCheckpoint, rank: int, identity: Identity) -> VerifiedShard:
        manifest = self._manifest(sought.number)
        # closed at once, so that there is not one open file for each rank
        with contextlib.closing(_shard(self.store, manifest, rank)) as shard:
            if (manifest.step, identity_of(manifest, shard)) != (sought.step, identity):
                raise IntegrityError(f"{shard.path} is not what was committed.")
            if bad := shard.verify():
                raise IntegrityError(bad[0][1])
        return VerifiedShard(
            str(shard.path), partial(_shard, self.store, manifest, rank), identity, shard.chunk_bytes, shard.size
        )

    # -- disk
    def _is_ours(self, number: int) -> bool:
        """Whether what has this checkpoint's name on disk may be that checkpoint."""
        try:
            self.store.manifest(number)
        except NotOurs:
            return False
        except CheckpointError:
            pass  # damaged, or it cannot be read: it was committed
        return True

    def _manifest(self, number: int) -> Manifest:
        path = self.store.path(number)
        try:
            manifest, _ = unseal(read_small(self.store.files, path / MANIFEST, MANIFEST_BYTES_MAX), Manifest, path)
        except FileNotFoundError as error:
            raise IntegrityError(f"{path} does not exist.") from error
        except OSError as error:
            raise IntegrityError(f"{path / MANIFEST} cannot be read: {error.strerror or error}.") from error
        if (manifest.job, manifest.number) != (self.store.job, number):
            raise IntegrityError(f"{path} holds checkpoint {manifest.number} of the job {manifest.job} instead.")
        return manifest


def identities(store: DurableStore, manifest: Manifest) -> tuple[Identity | None, ...]:
    """Return the identity of each rank's shard in ``store``; None when its fragment cannot be read."""
    found: list[Identity | None] = []
    for rank in range(manifest.world_size):
        identity = None
        with contextlib.suppress(IntegrityError), contextlib.closing(_shard(store, manifest, rank)) as shard:
            identity = identity_of(manifest, shard)
        found.append(identity)
    return tuple(found)


def _shard(store: DurableStore, manifest: Manifest, rank: int) -> ShardReader:
    directory = store.data(manifest)
    if rank >= manifest.world_size:
        raise IntegrityError(
            f"{directory} was written by {manifest.world_size} ranks, and has no shard of rank {rank}.",
            remedy="name a rank that the checkpoint has.",
        )
    return ShardReader(store.files, directory, manifest, manifest.shards[rank])


def _recorded(record: CommitRecord) -> CommittedCheckpoint:
    shards = {shard.owner: (shard.digest, shard.layout_hash) for shard in record.shards if shard.kind == "data"}
    return CommittedCheckpoint(
        record.number, record.step, record.fencing_token, tuple(shards.get(r) for r in range(max(shards) + 1))
    )


def _check_unused(arenas: Iterable[FoundArena]) -> None:
    for one in arenas:
        if one.state is ArenaState.USED:
            raise _in_use(one.path, one.why)


def _in_use(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is in use: {why}.",
        remedy="end the job first, or let it go on: it restores from there itself. Of a container that is gone: --gone.",
    )
