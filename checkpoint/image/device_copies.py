"""Tensors of a device into an image in the host's memory, many of them in one call of torch.

A Python loop over a thousand tensors holds the interpreter for milliseconds, in which the thread that trains launches nothing. What takes Python
here is done once for each image that lies in the same place with the same layout: where every tensor goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.checkpoint.image.safetensors_image import Cuts, bits_of, memory_of, no_cuts

__all__ = ["DeviceCopies"]

_KEPT = 4
"""Two snapshots, and two checkpoints on their way."""


class _Places:
    """Where the tensors of an image lie in ``into``."""

    def __init__(self, layout: ImageLayout, into: memoryview, cuts: Cuts) -> None:
        self.layout = layout
        self._memory = torch.frombuffer(memory_of(into), dtype=torch.uint8)
        self._cuts = cuts
        self._places: dict[str, tuple[torch.Tensor, list[int]]] = {}

    def of(self, name: str, bits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The place of a tensor that has these ``bits``, as integers of the same size and shape; and where it is cut, in bytes."""
        known = self._places.get(name)
        if known is None:
            start, _ = self.layout.extents[name]
            place = self._memory[start : start + bits.nbytes].view(bits.dtype).view(bits.shape)
            known = self._places[name] = place, self._cuts(place.data_ptr(), bits.nbytes)
        return known


class DeviceCopies:
    """Not for two threads at once."""

    def __init__(self, cuts: Cuts = no_cuts) -> None:
        self._cuts = cuts
        self._kept: dict[tuple[int, bytes], _Places] = {}

    def forget(self) -> None:
        """The memory of an image goes: nothing here refers to it any more."""
        self._kept.clear()

    def enqueue(
        self, layout: ImageLayout, tensors: Mapping[str, torch.Tensor], names: Collection[str], into: memoryview
    ) -> None:
        """On the current stream: ``names`` of ``tensors`` are there when it has come so far. Nothing is checked."""
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
        """As `enqueue`, in the order of the image, about ``group_bytes`` at a time. Yields, behind each group, where it ends in the image: of
        ``names``, all that lies before is there when the stream has come so far."""
        places = self._places_in(layout, into)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        begun = end = 0
        for entry in layout.entries:
            if entry.name not in names or not entry.box.numel:
                continue
            begun, end = (begun, layout.extents[entry.name][1]) if targets else layout.extents[entry.name]
            bits = bits_of(tensors[entry.name])
            place, cuts = places.of(entry.name, bits)
            if cuts:
                flat, there = (one.contiguous().view(-1).view(torch.uint8) for one in (bits, place))
                for start, stop in zip((0, *cuts), (*cuts, flat.numel()), strict=True):
                    targets.append(there[start:stop])
                    sources.append(flat[start:stop])
            else:
                targets.append(place)
                sources.append(bits)
            if end - begun >= group_bytes:
                torch._foreach_copy_(targets, sources, non_blocking=True)
                targets, sources = [], []
                yield end
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
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
