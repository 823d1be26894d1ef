"""Find the tensors that a damaged chunk of a durable shard may have hit.

A CRC32C shows that some byte of a chunk is wrong, not which. The shard's header says what lies in the chunk. The header
is trusted only when it has the layout hash in the manifest, so it may be read from the damaged chunk itself.
"""

from __future__ import annotations

from rackrun.checkpoint.base.errors import CheckpointError
from rackrun.checkpoint.durable.durable_manifest import Manifest, shard_name
from rackrun.checkpoint.durable.durable_reader import ShardReader, fill
from rackrun.checkpoint.durable.durable_store import Damage, DurableStore
from rackrun.checkpoint.durable.storage.files import opened
from rackrun.checkpoint.image.image_layout import ImageLayout, header_bytes, parse_image

__all__ = ["HEADER", "suspects"]

HEADER = "(header)"
_HASH_DIGITS = 64
_PREFIX_BYTES = 8


def suspects(store: DurableStore, number: int, damage: Damage) -> tuple[str, ...]:
    """Return the names of the tensors that overlap a damaged chunk, by offset. Returns ``(HEADER,)`` if the header is
    damaged, and () if the damage is outside all tensors or the shard has no readable layout."""
    if damage.rank is None or damage.chunk is None:
        return ()
    try:
        manifest, _ = store.whole(number)
        record = manifest.shards[damage.rank]
        reader = ShardReader(store.files, store.data(manifest), manifest, record)
        chunk_bytes = reader.chunk_bytes
        reader.close()
    except (CheckpointError, OSError):
        return ()
    if len(record.layout_hash) != _HASH_DIGITS:
        return ()
    layout = _layout(store, manifest, damage.rank)
    if layout is None:
        return (HEADER,) if damage.chunk == 0 else ()
    low, high = damage.chunk * chunk_bytes, (damage.chunk + 1) * chunk_bytes
    hit = [(start, name) for name, (start, stop) in layout.extents.items() if start < min(stop, high) and stop > low]
    return tuple(name for _, name in sorted(hit))


def _layout(store: DurableStore, manifest: Manifest, rank: int) -> ImageLayout | None:
    """Return the shard's layout; None when the header is not the one that was saved."""
    record = manifest.shards[rank]
    path = store.data(manifest) / shard_name(rank, manifest.world_size)
    try:
        with opened(store.files, path) as fd:
            prefix = memoryview(bytearray(min(_PREFIX_BYTES, record.size)))
            fill(store.files, fd, prefix, 0, path)
            header = memoryview(bytearray(header_bytes(prefix, limit=record.size)))
            fill(store.files, fd, header, 0, path)
        layout = parse_image(header, limit=record.size)
    except (CheckpointError, OSError):
        return None
    return layout if layout.layout_hash == record.layout_hash else None
