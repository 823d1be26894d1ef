"""Describes parameters that lie one after another in one tensor: a bucket of DDP, or what FSDP reduces at once."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Factors", "Segments"]


@dataclass(frozen=True)
class Factors:
    """One factor for every slot."""

    host: list[float]
    there: torch.Tensor
    """The same factors on the device, fp32."""

    @classmethod
    def all_of(cls, device: torch.device, *lists: list[float]) -> list[Factors]:
        """Return the factors for each of ``lists``. The host waits for the device once for all of them."""
        rows = torch.tensor(lists, dtype=torch.float32, device=device)
        return [cls(one, row) for one, row in zip(lists, rows, strict=True)]


class Segments:
    """The parts of one tensor. ``slots``: each parameter's index in what is kept for all parameters (scales, maxima).
    ``sizes``: elements of each parameter in this tensor."""

    def __init__(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        self.slots, self.sizes = tuple(slots), tuple(sizes)
        self.starts = (0, *itertools.accumulate(sizes))
        self.count = self.starts[-1]
        self._tables: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._places: dict[torch.device, torch.Tensor] = {}

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Yield each parameter's slot and its slice of the tensor."""
        for slot, start, size in zip(self.slots, self.starts, self.sizes, strict=False):
            yield slot, slice(start, start + size)

    def places(self, device: torch.device) -> torch.Tensor:
        """Return ``slots`` on ``device``, int64. They are copied there once, because the host would wait for a copy."""
        if device not in self._places:
            self._places[device] = torch.tensor(self.slots, device=device)
        return self._places[device]

    def table_apart(self, block: int, device: torch.device) -> torch.Tensor:
        """Return the table for a kernel that processes ``block`` elements of one segment at a time, where each segment
        has memory of its own.

        It is int64 and flat: the segment of each block; the block's index in that segment; size and slot of each
        segment. Copied to ``device`` once.
        """
        key = -block, device
        if key not in self._tables:
            blocks = [(number, at) for number, size in enumerate(self.sizes) for at in range(-(-size // block))]
            rows = [number for size, slot in zip(self.sizes, self.slots, strict=True) for number in (size, slot)]
            flat = [*(number for number, _ in blocks), *(at for _, at in blocks), *rows]
            self._tables[key] = torch.tensor(flat, dtype=torch.int64, device=device)
        return self._tables[key]

    def blocks_apart(self, block: int) -> int:
        """Return the number of blocks of ``block`` elements when each segment is divided on its own."""
        return sum(-(-size // block) for size in self.sizes)

    def table(self, block: int, device: torch.device) -> torch.Tensor:
        """Return the table for a kernel that processes ``block`` elements of the whole tensor at a time.

        It is int64 and flat: the first segment in each block; the last segment in each block; start, stop and slot of
        each segment. Copied to ``device`` once.
        """
        key = block, device
        if key not in self._tables:
            blocks = range(0, self.count, block)
            ends = self.starts[1:]
            first = [bisect.bisect_right(ends, start) for start in blocks]
            last = [bisect.bisect_right(ends, min(start + block, self.count) - 1) for start in blocks]
            rows = [
                number
                for slot, start, stop in zip(self.slots, self.starts, ends, strict=False)
                for number in (start, stop, slot)
            ]
            self._tables[key] = torch.tensor([*first, *last, *rows], dtype=torch.int64, device=device)
        return self._tables[key]
