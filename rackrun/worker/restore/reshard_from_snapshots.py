"""Fills the state of a rank in a world of another size from old ranks' snapshots, sealed at the end of the last
committed step.

Each tensor comes from the old ranks that hold parts of it. The rank's own snapshot is used first, where it has all of a
tensor, which saves network traffic. Buffers, in which replicas may differ, and everything that is not a tensor come
from the first old rank, as when a job resumes from disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rackrun.checkpoint.arena.arena_slot import SlotReader
from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.image_layout import TensorEntry
from rackrun.errors import StateLost
from rackrun.protocol.commands import Reshard
from rackrun.worker.restore.old_images import OldImages
from rackrun.worker.restore.refill import Refill, check_alike
from rackrun.worker.state.state_manifest import StateManifest
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["reshard"]

_THREADS_MAX = 4
_filling = threading.Lock()
"""One attempt fills at a time: one whose plan was replaced ends soon, but not before it has written."""


def reshard(
    state: TrackedState,
    rank: int,
    of: Reshard,
    named: int,
    me: str,
    own: Callable[[int], SlotReader | None],
    token: str,
    heard: Callable[[], bool],
) -> StateManifest:
    """Fill ``state``, which belongs to ``rank`` of the new world, from the snapshots named ``named``, and return the
    first old rank's manifest.

    ``me``: the end of the address of this process's own snapshot. ``own``: returns that snapshot, or None. ``heard``:
    False once nobody waits for the result any more.

    Raises `rackrun.worker.restore.snapshot_fetch.CorruptSnapshot` when an image cannot be read or is not what was sealed,
    `RuntimeError` when a newer generation was announced, and `StateLost` when the old ranks do not hold what this one
    needs.
    """
    with _filling, OldImages(named, me, own, token, heard) as images:
        opened = [images.open(where) for where in dict.fromkeys(where for where in of.images if where)]
        layouts = [image.layout for image in opened]
        mine = next((index for index, image in enumerate(opened) if images.is_own(image.where)), None)

        def source(path: str, target: TensorEntry) -> int | None:
            if state.is_buffer(path) and layouts[0].by_name.get(target.name) == target:
                return 0
            held = None if mine is None else layouts[mine].by_name.get(target.name)
            here = held is not None and held.global_shape == target.global_shape and held.dtype == target.dtype
            return mine if here and held is not None and held.box.contains(target.box) else None

        first = opened[0].manifest
        try:
            refill = Refill(state, first, rank, layouts, range(len(opened)), source)
            for index, fetches in refill.fetches.items():
                opened[index].expect([(fetch.start, fetch.stop) for fetch in fetches])
            used = sorted({0, *refill.fetches})
            check_alike((opened[index].manifest for index in used), "the old ranks")
        except LayoutMismatch as error:
            raise StateLost(
                f"rank {rank} cannot get its state from the {len(opened)} old ranks: {error.what}", remedy=error.remedy
            ) from error
        refill.run(lambda index, start, stop: opened[index].read(start, stop), _threads())
        return first


def _threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // ranks))
