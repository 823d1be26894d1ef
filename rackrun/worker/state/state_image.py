"""Writes and reads a rank's tracked state as one image: a safetensors file in memory, with the manifest as its plain
part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.boxes import Box
from rackrun.checkpoint.image.image_layout import TensorEntry, layout_in
from rackrun.checkpoint.image.plain_part import pack, unpack
from rackrun.checkpoint.image.rank_image import Image, ImagePlanner
from rackrun.checkpoint.image.safetensors_image import Cuts, no_cuts, read_plain, read_tensors
from rackrun.checkpoint.image.tensor_entries import entries_of
from rackrun.worker.state.state_manifest import StateManifest, TensorInfo
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.freed_tensors import refuse_freed
from rackrun.worker.tensors.tensor_bytes import digests_by_path, local_part
from rackrun.worker.tensors.tensor_lists import local_parts

__all__ = ["StateImages", "entry_of", "load_image", "manifest_in"]


class StateImages:
    """Describes a state repeatedly as images. The layout is planned again only when a tensor has another address, shape
    or kind."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._described_for: tuple[list[TensorInfo], int | None] | None = None
        self._entries: list[TensorEntry] = []
        """Entries of all tensors, in the order of `TrackedState.parts`."""
        self._shared: dict[str, int] = {}
        """Path -> bytes, of the tensors that replicas hold as well."""
        self._planner = ImagePlanner()

    def describe(
        self, replica_class: str, *, rank: int | None = None, turn: int = 0, turns: int = 1, digests: bool = False
    ) -> Image:
        """Describe the current state as an image.

        ``rank``: with it, a tensor that is not a box of a whole one has the rank in its name, and every rank describes
        its own. ``turn``, ``turns``: replicas may share the work; this one, number ``turn`` of ``turns``, then
        describes its share of the tensors, and all buffers, in which replicas may differ. ``digests``: add digests of
        the tensors that this rank holds as a whole to the manifest.

        Raises `LayoutMismatch` for a dtype that images do not support, and `StepError` for a tensor whose memory was
        freed.
        """
        parts = self._state.parts()
        infos = self._state.infos(parts)
        local = local_parts(parts.values())
        if self._described_for is None or self._described_for[0] is not infos or self._described_for[1] != rank:
            self._plan_entries(parts, local, rank)
            self._described_for = infos, rank
        manifest = self._state.manifest(replica_class, infos)
        tensors = {entry.name: tensor for entry, tensor in zip(self._entries, local, strict=True)}
        if digests:
            boxes = {entry.name: entry for entry in self._entries}
            whole = {p: tensors[p] for p in self._shared if boxes[p].box.sizes == boxes[p].global_shape}
            manifest = msgspec.structs.replace(manifest, whole=digests_by_path(whole))
        plain = pack(msgspec.msgpack.encode(manifest))
        entries = self._entries
        if turns > 1:
            for path in _others_share(self._shared, turn, turns):
                del tensors[path]
            entries = [entry for entry in entries if entry.name in tensors]
        return self._planner.image(entries, tensors, plain)

    def _plan_entries(self, parts: Mapping[str, torch.Tensor], local: Sequence[torch.Tensor], rank: int | None) -> None:
        self._described_for = None
        refuse_freed(dict(zip(parts, local, strict=True)))
        self._entries = [entry_of(path, tensor, rank) for path, tensor in parts.items()]
        self._shared = {
            path: tensor.nbytes
            for (path, tensor), entry in zip(zip(parts, local, strict=True), self._entries, strict=True)
            if entry.name == path and not self._state.is_buffer(path)
        }


def _others_share(sizes: dict[str, int], turn: int, turns: int) -> list[str]:
    """Return the paths that belong to other replicas. All replicas get about as many bytes: each tensor, the largest
    first, goes to the one with the least, so all compute the same shares."""
    loads = [0] * turns
    others = []
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        least = loads.index(min(loads))
        loads[least] += sizes[path]
        if least != turn:
            others.append(path)
    return others


def entry_of(path: str, tensor: torch.Tensor, rank: int | None) -> TensorEntry:
    """Return the tensor's entry: its box of the whole tensor or, where that is not certain, this rank's part as a
    tensor of its own, with ``rank`` in its name if given."""
    try:
        (entry,) = entries_of({path: tensor})
    except (LayoutMismatch, ValueError):
        local = local_part(tensor)
        name = path if rank is None else f"{path}@{rank}"
        return TensorEntry(name, str(local.dtype).removeprefix("torch."), tuple(local.shape), Box.whole(local.shape))
    return entry


def load_image(state: TrackedState, payload: memoryview, threads: int = 1, *, cuts: Cuts = no_cuts) -> StateManifest:
    """Load a verified image of this rank's own shard into ``state``, and return its manifest. ``cuts``: see
    `read_tensors`."""
    layout = layout_in(payload)
    manifest = manifest_in(read_plain(layout, payload))
    tensors = state.allocate(manifest)
    local = {info.path: local_part(tensors[info.path]) for info in manifest.tensors}
    read_tensors(layout, local, payload, threads, cuts=cuts)
    state.load_plain(manifest, tensors)
    return manifest


def manifest_in(plain: bytes) -> StateManifest:
    """Return the manifest in the plain part of an image. Raises `IntegrityError` if it cannot be read."""
    return unpack(plain, StateManifest)
