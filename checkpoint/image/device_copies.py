"""Copy tensors from a device into an image in host memory, many of them in one torch call.

A Python loop over a thousand tensors holds the interpreter for milliseconds, in which the training thread launches
nothing. So the Python work, finding each tensor's place, is done once for each image memory and layout. And nearly
every torch call for a tensor gives the interpreter's lock up and takes it again, as does the end of a tensor object:
each time the training thread may have to wait for it. So tensors are copied as they are, without views of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.checkpoint.image.safetensors_image import Cuts, bits_of, memory_of, no_cuts

__all__ = ["DeviceCopies"]

_AS_THEY_ARE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
"""dtypes of which torch copies contiguous tensors bit by bit. A bool on the host becomes 0 or 1 on the way."""
_KEPT = 4
"""How many images' places are kept: two snapshots, and two checkpoints on their way."""


class _Places:
    """Where the tensors of one image lie in ``into``."""

    def __init__(self, layout: ImageLayout, into: memoryview, cuts: Cuts) -> None:
        self.layout = layout
        self._memory = torch.frombuffer(memory_of(into), dtype=torch.uint8)
        self._cuts = cuts
        self._places: dict[tuple[str, torch.dtype], tuple[torch.Tensor, list[int]]] = {}

    def of(self, name: str, source: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return a tensor's memory in the image, and where its copy is cut, in bytes.

        The memory is a tensor with the dtype and shape of ``source``.
        """
        known = self._places.get((name, source.dtype))
        if known is None:
            start, _ = self.layout.extents[name]
            place = self._memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
            known = self._places[name, source.dtype] = place, self._cuts(place.data_ptr(), source.nbytes)
        return known


class DeviceCopies:
    """Enqueues copies from a device, and remembers the places of the last images. Not for two threads at once."""

    def __init__(self, cuts: Cuts = no_cuts) -> None:
        self._cuts = cuts
        self._kept: dict[tuple[int, bytes], _Places] = {}

    def forget(self) -> None:
        """Drop all references to image memory, before the memory is freed."""
        self._kept.clear()

    def enqueue(
        self, layout: ImageLayout, tensors: Mapping[str, torch.Tensor], names: Collection[str], into: memoryview
    ) -> None:
        """Enqueue copies of ``names`` on the current stream.

        They are done when the stream has come so far. Nothing is checked.
        """
        for _ in self.in_groups(layout, tensors, names, into, group_bytes=layout.total_bytes):
            pass

    def in_groups(
        self,
        layout: ImageLayout,
        tensors: Mapping[str, torch.Tensor],
        names: Collection[str],
        into: memoryview,
        group_bytes: int,
    ) -> Iterator[int]:
        """Enqueue copies like `enqueue`, in the order of the image, about ``group_bytes`` at a time.

        Yields the byte in the image where each group ends: all ``names`` before it are copied when the stream has come
        so far.
        """
        places = self._places_in(layout, into)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        begun = end = 0
        for entry in layout.entries:
            if entry.name not in names or not entry.box.numel:
                continue
            begun, end = (begun, layout.extents[entry.name][1]) if targets else layout.extents[entry.name]
            source = tensors[entry.name]
            if source.dtype not in _AS_THEY_ARE or not source.is_contiguous():
                source = bits_of(source)
            place, cuts = places.of(entry.name, source)
            if cuts:
                flat, there = (one.detach().contiguous().view(-1).view(torch.uint8) for one in (source, place))
                for start, stop in zip((0, *cuts), (*cuts, flat.numel()), strict=True):
                    targets.append(there[start:stop])
                    sources.append(flat[start:stop])
            else:
                targets.append(place)
                sources.append(source)
            if end - begun >= group_bytes:
                _copy(targets, sources)
                targets, sources = [], []
                yield end
        if targets:
            _copy(targets, sources)
            yield end

    def _places_in(self, layout: ImageLayout, into: memoryview) -> _Places:
        key = torch.frombuffer(memory_of(into), dtype=torch.uint8).data_ptr(), bytes(layout.header)
        places = self._kept.pop(key, None)
        if places is None:
            places = _Places(layout, into, self._cuts)
        self._kept[key] = places  # the newest is the last
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return places


@torch.no_grad()
def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources, non_blocking=True)
