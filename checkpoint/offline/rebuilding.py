"""Rebuild the newest checkpoint for which every byte has a verified source, on disk, from what a dead job has left.

The checkpoint is assembled beside the job's checkpoints, read back, and only then given its name. A damaged checkpoint
of that name is set aside as trash for retention. If a rebuild is interrupted, the next one continues: by the time
something is set aside, it is no longer needed.

A checkpoint that is whole and right on disk is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rackrun.checkpoint.arena.arena_slot import SlotReader
from rackrun.checkpoint.base.errors import CheckpointError, FormatVersionError, NoUsableCheckpoint
from rackrun.checkpoint.durable.durable_manifest import kept_name, shard_name
from rackrun.checkpoint.durable.durable_reader import ShardReader
from rackrun.checkpoint.durable.durable_store import DurableStore
from rackrun.checkpoint.durable.durable_writer import CheckpointWriter
from rackrun.checkpoint.durable.probation import Probation
from rackrun.checkpoint.durable.storage.files import delete_tree, set_aside
from rackrun.checkpoint.image.image_layout import PLAIN, ImageLayout, layout_in
from rackrun.checkpoint.manager.replica_writers import Share, SharedTensors, assign, held_in
from rackrun.checkpoint.offline.job_remains import CommittedCheckpoint, Remains, VerifiedShard, identities

__all__ = ["BESIDE", "Rebuilt", "rebuild_checkpoint"]

BESIDE = ".rebuilding"
"""Folder in the job's directory for checkpoints that are not whole yet."""
_LOCK = ".rebuilding.lock"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rebuilt:
    """What was rebuilt, and from what."""

    number: int
    step: int
    world_size: int
    written: bool
    """False when the checkpoint was there already, whole, with every byte right."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Rank -> the file that its shard was read from."""
    bytes: int = 0
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """Number of a newer checkpoint -> why it was not taken."""
    missing: tuple[int, ...] = ()
    """Those of ``passed_over`` that were not barred: some of their bytes are missing."""


def rebuild_checkpoint(
    remains: Remains,
    target: DurableStore,
    number: int | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Rebuilt:
    """Make the newest checkpoint that can be restored whole in ``target``, or just checkpoint ``number``.

    ``dry_run``: write nothing. ``progress`` gets (bytes written so far, bytes in all).

    Raises `NoUsableCheckpoint` with what is missing of each checkpoint, `CheckpointError` when it cannot be written.
    """
    beside = DurableStore(target.directory / BESIDE, target.job, files=target.files)
    passed: dict[int, str] = {}
    barred = Probation(remains.store.directory).barred()
    known = {info.number for info in (*target.checkpoints(), *beside.checkpoints())}
    for each in sorted({*remains.numbers(), *known}, reverse=True) if number is None else [number]:
        if each in barred and number is None:
            passed[each] = barred[each]
            continue
        missing = tuple(one for one in passed if one not in barred)
        try:
            there = _whole(target, each)
            source = None if there is not None else _finished(remains, beside, each) or _found(remains, each)
        except CheckpointError as error:
            passed[each] = error.what
            continue
        if there is not None:
            _check_the_same(remains, target, there)
            if not dry_run:
                _tidy(beside, target, each)
            return replace(there, passed_over=passed, missing=missing)
        assert source is not None
        if not dry_run:
            _make(source, remains, beside, target, progress)
        return replace(source.told, written=not dry_run, passed_over=passed, missing=missing)
    story = " ".join(f"Checkpoint {each}: {why}" for each, why in passed.items())
    raise NoUsableCheckpoint(
        f"no checkpoint can be rebuilt. {story or 'There is neither an arena with a commit record nor anything on disk.'}",
        remedy="name the folders of arenas of all hosts with --arenas.",
    )


@dataclass(frozen=True)
class _Source:
    told: Rebuilt
    sought: CommittedCheckpoint
    found: Mapping[int, VerifiedShard]
    """Rank -> its shard. Empty when an earlier attempt has assembled the checkpoint, and it is right."""
    shares: Mapping[int, Share] = field(default_factory=dict)


def _whole(store: DurableStore, number: int) -> Rebuilt | None:
    """Return the checkpoint if it is there and all bytes are right, else None.

    Raises FormatVersionError when another release wrote it, so that nothing is known about it.
    """
    try:
        manifest, _ = store.whole(number)
        if not store.verify(number).ok:
            return None
    except FormatVersionError:
        raise
    except CheckpointError:
        return None
    size = sum(shard.size for shard in manifest.shards)
    return Rebuilt(number, manifest.step, manifest.world_size, False, bytes=size)


def _finished(remains: Remains, beside: DurableStore, number: int) -> _Source | None:
    """Return a checkpoint that an earlier, interrupted attempt assembled whole; None when there is none.

    It must be the one that was committed, as far as anything still says what that was.
    """
    if (told := _whole(beside, number)) is None:
        return None
    manifest, _ = beside.whole(number)
    shards = identities(beside, manifest)
    with contextlib.suppress(CheckpointError):
        sought = remains.sought(number)
        known = [identity or shards[rank] for rank, identity in enumerate(sought.shards) if rank < len(shards)]
        if (sought.step, len(sought.shards), known) != (manifest.step, len(shards), list(shards)):
            return None
    where = {rank: str(beside.path(number) / shard_name(rank, len(shards))) for rank in range(len(shards))}
    return _Source(
        replace(told, sources=where), CommittedCheckpoint(number, manifest.step, manifest.fencing_token, shards), {}
    )


def _found(remains: Remains, number: int) -> _Source:
    """Return the sources of all shards of a checkpoint. Raises CheckpointError with all that is missing."""
    sought = remains.sought(number)
    found, missing = remains.find(sought)
    if missing:
        raise CheckpointError(" ".join(f"Rank {rank}: {why}" for rank, why in missing.items()))
    where = {rank: one.where for rank, one in found.items()}
    shares = _shares(found)
    told = Rebuilt(number, sought.step, len(found), False, where, _total(found, shares))
    return _Source(told, sought, found, shares)


def _check_the_same(remains: Remains, target: DurableStore, there: Rebuilt) -> None:
    """Raise CheckpointError when the checkpoint in ``target`` is of another run."""
    try:
        sought = remains.sought(there.number)
    except CheckpointError:
        return  # newer than all that is left of this job
    if (sought.step, len(sought.shards)) != (there.step, there.world_size):
        raise CheckpointError(
            f"{target.path(there.number)} is step {there.step} of {there.world_size} ranks, and not this job's step {sought.step}.",
            remedy="give a directory of its own.",
        )


# -- writing
def _make(
    source: _Source, remains: Remains, beside: DurableStore, target: DurableStore, progress: Progress | None
) -> None:
    number = source.told.number
    with _alone(target):
        if _whole(target, number) is not None:
            return  # another process has rebuilt it
        if source.found:
            _clear(beside, number)
            try:
                _write(beside, source, progress)
            except CheckpointError:
                with contextlib.suppress(CheckpointError):
                    _clear(beside, number)  # the space belongs to the job
                raise
        remains.check_gone()
        _publish(beside, target, number)


@contextlib.contextmanager
def _alone(target: DurableStore) -> Iterator[None]:
    """Hold the lock of the target. Raises CheckpointError when another process holds it, or nothing can be written."""
    path = target.directory / _LOCK
    try:
        target.root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            target.files.mkdir(target.directory)
        fd = target.files.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CheckpointError(
            f"{target.directory} cannot be written to: {error.strerror or error}.",
            remedy="give a directory that can be written to.",
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(target.files.stat(path), os.fstat(fd))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be locked: {error.strerror or error}.", remedy="give a directory elsewhere with --into."
            ) from error
        if not mine:
            raise CheckpointError(
                f"another rebuild is at work in {target.directory}.", remedy="do this again when it has ended."
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                target.files.unlink(path)
    finally:
        os.close(fd)


def _tidy(beside: DurableStore, target: DurableStore, number: int) -> None:
    """Remove what an interrupted attempt left behind, after it had already put the checkpoint in place."""
    if any(os.path.lexists(path) for path in (beside.root, target.directory / _LOCK)):
        with contextlib.suppress(CheckpointError), _alone(target):
            _clear(beside, number)


def _clear(beside: DurableStore, number: int) -> None:
    """Remove what earlier attempts left, except other whole checkpoints, which may exist nowhere else."""
    keep = {info.path for info in beside.checkpoints() if info.number != number}
    try:
        if not stat.S_ISDIR(beside.files.stat(beside.root).st_mode):
            raise CheckpointError(f"{beside.root} is no directory.", remedy="look whose it is, and move it away.")
        names = beside.files.listdir(beside.directory) if keep else []
        for path in [beside.directory / name for name in names] or [beside.root]:
            if path not in keep:
                for _ in delete_tree(beside.files, path):
                    pass
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"{beside.root} cannot be cleared: {error.strerror or error}.", remedy="remove it."
        ) from error


def _write(beside: DurableStore, source: _Source, progress: Progress | None) -> None:
    """Write all shards beside the target, make the checkpoint whole, and read it back. Raises CheckpointError."""
    sought, found, shares = source.sought, source.found, source.shares
    try:
        with contextlib.suppress(FileExistsError):
            beside.files.mkdir(beside.root)
    except OSError as error:
        raise CheckpointError(
            f"{beside.root} cannot be made: {error.strerror or error}.",
            remedy="give a directory that can be written to.",
        ) from error
    writer = beside.writer(sought.number, sought.step, sought.fencing_token, len(found))
    done = 0
    for rank, one in found.items():
        if not _write_shard(writer, rank, one, shares.get(rank)):
            raise CheckpointError(f"rank {rank}: {writer.failure}.", remedy="see that there is room, and try again.")
        done += _total({rank: one}, shares)
        if progress is not None:
            progress(done, source.told.bytes)
    if not writer.finish():
        raise CheckpointError(f"{beside.directory}: {writer.failure}.", remedy="see that there is room, and try again.")
    if not (verified := beside.verify(sought.number)).ok:
        raise CheckpointError(
            f"what was written is not what was read: {verified.damage[0].what}", remedy="look at that disk."
        )


def _write_shard(writer: CheckpointWriter, rank: int, found: VerifiedShard, share: Share | None) -> bool:
    if share is not None:
        return writer.write_shard(rank, share, share.layout.layout_hash, share.crcs(), share_of=found.identity)
    if isinstance(found.reader, SlotReader):
        slot = found.reader
        return writer.write_shard(rank, slot, slot.layout_hash, slot.crcs, chunk_bytes=found.chunk_bytes)
    with contextlib.closing(found.reader()) as reader:
        return writer.write_shard(
            rank,
            _FromDisk(reader),
            reader.layout_hash,
            reader.crcs,
            chunk_bytes=found.chunk_bytes,
            share_of=reader.share_of,
        )


def _publish(beside: DurableStore, target: DurableStore, number: int) -> None:
    """Move the assembled checkpoint to its place, after setting aside a damaged one of that name. What is no checkpoint
    of that number is kept, under another name."""
    try:
        if target.is_foreign(number):
            target.files.rename(target.path(number), target.directory / kept_name(number))
        else:
            set_aside(target.files, target.path(number))
        target.files.rename(beside.path(number), target.path(number))
        target.sync()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {number} is whole in {beside.directory}, and cannot be moved from there: {error.strerror or error}.",
            remedy="do this again when it can be written to.",
        ) from error
    _clear(beside, number)


def _shares(found: Mapping[int, VerifiedShard]) -> dict[int, Share]:
    """Divide the writing of equal tensors, as the job itself does; empty when each shard is written whole.

    If some shards come from disk, they rely on what the other shards had there, so all others are written whole.
    """
    if len(found) == 1 or not all(isinstance(one.reader, SlotReader) for one in found.values()):
        return {}
    layouts: dict[int, ImageLayout] = {}
    names: dict[int, list[str]] = {}
    held: list[SharedTensors] = []
    for rank, one in found.items():
        assert isinstance(one.reader, SlotReader)
        layouts[rank] = layout_in(one.reader.payload)
        mine = [entry.name for entry in layouts[rank].entries if entry.name != PLAIN]
        names[rank], of_rank = held_in(one.reader, layouts[rank], mine, one.chunk_bytes)
        held.append(of_rank)
    shares = {}
    for rank, writers in zip(found, assign(held), strict=True):
        elsewhere = {name: by for name, by in zip(names[rank], writers.ranks, strict=True) if by != rank}
        if elsewhere:
            reader = found[rank].reader
            assert isinstance(reader, SlotReader)
            shares[rank] = Share(reader, layouts[rank], elsewhere, found[rank].chunk_bytes)
    return shares


def _total(found: Mapping[int, VerifiedShard], shares: Mapping[int, Share]) -> int:
    """Return how many bytes will be written."""
    return sum(shares[rank].nbytes if rank in shares else one.bytes for rank, one in found.items())


class _FromDisk:
    """The verified bytes of a shard on disk, read by slices."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader, self.nbytes = reader, reader.size

    @property
    def payload(self) -> _FromDisk:
        return self

    def __getitem__(self, wanted: slice) -> memoryview:
        start, stop, _ = wanted.indices(self.nbytes)
        return self._reader.read(start, stop)
