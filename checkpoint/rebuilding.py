"""A whole generation on disk, out of what a job that is gone has left: the newest of which every byte has a verified source.

It is put together beside the job's generations, read back, and only then given its name. What had that name and was damaged
is set aside, as waste for retention. Whatever ends this on the way, it goes on from there the next time: what is set aside
is not needed any more by then.

What is whole on disk, and right, is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rackrun.checkpoint.arena_slot import SlotReader
from rackrun.checkpoint.durable import DurableStore
from rackrun.checkpoint.durable_reader import ShardReader
from rackrun.checkpoint.durable_writer import GenerationWriter
from rackrun.checkpoint.errors import CheckpointError, NoUsableGeneration
from rackrun.checkpoint.files import delete_tree, set_aside
from rackrun.checkpoint.layout import PLAIN, ImageLayout, header_bytes, parse_image
from rackrun.checkpoint.probation import Probation
from rackrun.checkpoint.remains import Found, Remains, Sought
from rackrun.checkpoint.sharing import Held, Share, assign, held_in

__all__ = ["BESIDE", "Rebuilt", "rebuild_generation"]

BESIDE = ".rebuilding"
"""In the job's directory: what is not whole yet."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rebuilt:
    generation: int
    step: int
    world_size: int
    written: bool
    """False: it was there, whole, and every byte was right."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """Rank -> the file that its shard was read from."""
    bytes: int = 0
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """Newer generation -> why it cannot be had."""


def rebuild_generation(
    remains: Remains,
    target: DurableStore,
    generation: int | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Rebuilt:
    """Make the newest generation that can be had whole in ``target``, or just ``generation``. ``progress`` is called with the bytes
    written so far and all there are.

    Raises `NoUsableGeneration` with what is missing of each, `CheckpointError` when it cannot be written.
    """
    beside = DurableStore(target.directory / BESIDE, target.job, files=target.files)
    passed: dict[int, str] = {}
    barred = Probation(remains.store.directory).barred()
    known = {info.generation for info in (*target.generations(), *beside.generations())}
    for number in sorted({*remains.generations(), *known}, reverse=True) if generation is None else [generation]:
        if (there := _whole(target, number, passed)) is not None:
            _check_the_same(remains, target, there)
            return there
        if not dry_run and (there := _whole(beside, number, passed)) is not None:
            _publish(beside, target, number)
            return Rebuilt(number, there.step, there.world_size, True, bytes=there.bytes, passed_over=passed)
        if number in barred and generation is None:
            passed[number] = barred[number]
            continue
        try:
            sought = remains.sought(number)
        except CheckpointError as error:
            passed[number] = error.what
            continue
        found, missing = remains.find(sought)
        if missing:
            passed[number] = " ".join(f"Rank {rank}: {why}" for rank, why in missing.items())
            continue
        sources = {rank: one.where for rank, one in found.items()}
        size = 0 if dry_run else _write(beside, sought, found, progress)
        if not dry_run:
            _publish(beside, target, number)
        return Rebuilt(number, sought.step, len(found), not dry_run, sources, size, passed)
    story = " ".join(f"Generation {number}: {why}" for number, why in passed.items())
    raise NoUsableGeneration(
        f"no generation can be rebuilt. {story or 'There is neither an arena with a commit record nor anything on disk.'}",
        remedy="name the folders of arenas of all hosts with --arenas.",
    )


def _whole(store: DurableStore, generation: int, passed: Mapping[int, str]) -> Rebuilt | None:
    """It is there, and all bytes were read and are right."""
    try:
        manifest, _ = store.whole(generation)
        if not store.verify(generation).ok:
            return None
    except CheckpointError:
        return None
    size = sum(shard.size for shard in manifest.shards)
    return Rebuilt(generation, manifest.step, manifest.world_size, False, bytes=size, passed_over=dict(passed))


def _check_the_same(remains: Remains, target: DurableStore, there: Rebuilt) -> None:
    """Another directory may be another run's."""
    try:
        sought = remains.sought(there.generation)
    except CheckpointError:
        return  # newer than all that is left of this one
    if (sought.step, len(sought.shards)) != (there.step, there.world_size):
        raise CheckpointError(
            f"{target.path(there.generation)} is step {there.step} of {there.world_size} ranks, and not this job's step {sought.step}.",
            remedy="give a directory of its own.",
        )


# -- writing
def _write(beside: DurableStore, sought: Sought, found: Mapping[int, Found], progress: Progress | None) -> int:
    """What an earlier attempt has left is not whole: it goes. Returns the bytes."""
    for _ in delete_tree(beside.files, beside.root):
        pass
    try:
        beside.root.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"{beside.root} cannot be made: {error.strerror or error}.",
            remedy="give a directory that can be written to.",
        ) from error
    writer = beside.writer(sought.generation, sought.step, sought.epoch, len(found))
    shares = _shares(found)
    total, done = sum(_size(shares.get(rank), one) for rank, one in found.items()), 0
    for rank, one in found.items():
        if not _write_shard(writer, rank, one, shares.get(rank)):
            raise CheckpointError(f"rank {rank}: {writer.failure}.", remedy="see that there is room, and try again.")
        done += _size(shares.get(rank), one)
        if progress is not None:
            progress(done, total)
    if not writer.finish():
        raise CheckpointError(f"{beside.directory}: {writer.failure}.", remedy="see that there is room, and try again.")
    if not (verified := beside.verify(sought.generation)).ok:
        raise CheckpointError(
            f"what was written is not what was read: {verified.damage[0].what}", remedy="look at that disk."
        )
    return total


def _write_shard(writer: GenerationWriter, rank: int, found: Found, share: Share | None) -> bool:
    reader = found.reader
    if share is not None:
        return writer.write_shard(rank, share, share.layout.layout_hash, share.crcs(), share_of=found.identity)
    if isinstance(reader, SlotReader):
        return writer.write_shard(rank, reader, reader.layout_hash, reader.crcs, chunk_bytes=found.chunk_bytes)
    return writer.write_shard(
        rank,
        _FromDisk(reader),
        reader.layout_hash,
        reader.crcs,
        chunk_bytes=found.chunk_bytes,
        share_of=reader.share_of,
    )


def _publish(beside: DurableStore, target: DurableStore, generation: int) -> None:
    """It is whole and right. What has its name is not."""
    try:
        set_aside(target.files, target.path(generation))
        target.files.rename(beside.path(generation), target.path(generation))
        target.sync()
        for _ in delete_tree(beside.files, beside.root):
            pass
    except OSError as error:
        raise CheckpointError(
            f"generation {generation} is whole in {beside.directory}, and cannot be moved from there: {error.strerror or error}.",
            remedy="do this again when it can be written to.",
        ) from error


def _shares(found: Mapping[int, Found]) -> dict[int, Share]:
    """Who writes what, as the job itself does it. When shards on disk are used too, they rely on what the others had there:
    every other one is written as a whole."""
    if len(found) == 1 or not all(one.in_memory for one in found.values()):
        return {}
    layouts: dict[int, ImageLayout] = {}
    names: dict[int, list[str]] = {}
    held: list[Held] = []
    for rank, one in found.items():
        assert isinstance(one.reader, SlotReader)
        layouts[rank] = _layout(one.reader)
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


def _layout(reader: SlotReader) -> ImageLayout:
    size = len(reader.payload)
    length = header_bytes(reader.payload[: min(8, size)], limit=size)
    return parse_image(reader.payload[:length], limit=size)


def _size(share: Share | None, found: Found) -> int:
    if share is not None:
        return share.nbytes
    return len(found.reader.payload) if isinstance(found.reader, SlotReader) else found.reader.size


class _FromDisk:
    """A shard's verified bytes, by slices."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader, self.nbytes = reader, reader.size

    @property
    def payload(self) -> _FromDisk:
        return self

    def __getitem__(self, wanted: slice) -> memoryview:
        start, stop, _ = wanted.indices(self.nbytes)
        return self._reader.read(start, stop)
