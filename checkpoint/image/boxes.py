"""Boxes: the parts of a tensor that ranks hold, as offsets and sizes for each dim, and their bytes in memory.

Resharding to another world size is arithmetic on boxes: which parts cover a wanted box (`cover`), and which bytes of a
part those are (`runs`). A tensor without dims has one element and one box, ``Box((), ())``. A box with a size of 0
intersects nothing, and needs no cover.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rackrun.checkpoint.base.errors import LayoutMismatch

__all__ = ["Box", "cover", "overlap_of", "runs"]

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Box:
    """``sizes`` elements from ``offsets`` on, in a tensor of as many dims.

    Raises ValueError when the lengths differ or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or (self.sizes and (min(self.offsets) < 0 or min(self.sizes) < 0)):
            raise ValueError(f"offsets {self.offsets} and sizes {self.sizes} are not a box")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both; None when there are none.

        Raises `LayoutMismatch` for different dims.
        """
        if self == other:
            return self if self.numel else None
        _same_dims(self, other)
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether all of ``other`` lies in this box. Raises `LayoutMismatch` for different dims."""
        _same_dims(self, other)
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        """Return the box as an index: ``[0:4, 8:16]``."""
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.offsets, self.sizes, strict=True))}]"


def cover(target: Box, parts: Sequence[tuple[Box, T]]) -> list[tuple[Box, T]]:
    """Cover ``target`` with disjoint pieces, each from one part, and return (piece, part) in the order of ``parts``.

    Where parts overlap, the earlier one is used. Parts that are disjoint within ``target`` give one piece each. Raises
    `LayoutMismatch`, naming a box that no part holds.
    """
    if target.numel == 0:
        return []
    clipped = [(piece, of) for box, of in parts if (piece := target.intersect(box)) is not None]
    if clipped and clipped[0][0] == target:
        return clipped[:1]
    disjoint = sum(piece.numel for piece, _ in clipped) <= target.numel  # or they leave a gap, which raises below
    rest, pieces = [target], []
    # sorted, so that the rest stays in few boxes
    for piece, of in sorted(clipped, key=_box_of) if disjoint else clipped:
        left: list[Box] = []
        for box in rest:
            common = box.intersect(piece)
            if common is None:
                left.append(box)
            else:
                pieces.append((common, of))
                left.extend(_without(box, common))
        rest = left
        if not rest:
            break
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise LayoutMismatch(
            f"no part holds {rest[0]}{more} of {target}.",
            remedy="bring back the ranks or files that held it, or restore an older checkpoint.",
        )
    return clipped if disjoint else pieces


def overlap_of(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element; None when none do. Quadratic: for error messages, not for checks."""
    return next(((a, b) for a, b in itertools.combinations(boxes, 2) if a.intersect(b) is not None), None)


def runs(piece: Box, inside: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (byte offset, bytes) of the contiguous runs of ``piece`` in the row-major memory of ``inside``, ascending.

    ``itemsize``: bytes of an element.
    """
    assert inside.contains(piece), f"{piece} is not within {inside}"
    if piece.numel == 0:
        return
    strides = _strides(inside.sizes)
    dim = len(piece.sizes)
    run = 1
    while dim and run == math.prod(inside.sizes[dim:]):  # so far whole rows of `inside`: the next dim continues them
        dim -= 1
        run *= piece.sizes[dim]
    at = sum((p - i) * s for p, i, s in zip(piece.offsets, inside.offsets, strides, strict=True))
    for index in itertools.product(*map(range, piece.sizes[:dim])):
        yield (at + sum(i * s for i, s in zip(index, strides, strict=False))) * itemsize, run * itemsize


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides, in elements."""
    return tuple(itertools.accumulate(reversed(sizes[1:]), int.__mul__, initial=1))[::-1] if sizes else ()


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield boxes that cover ``box`` except ``hole``, which lies in it. Outer dims are cut first, for long runs."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(hole.offsets, hole.sizes, strict=True)):
        before, after = start - offsets[dim], offsets[dim] + sizes[dim] - start - size
        if before:
            yield Box(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :]))
        if after:
            yield Box((*offsets[:dim], start + size, *offsets[dim + 1 :]), (*sizes[:dim], after, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = start, size


def _box_of(part: tuple[Box, object]) -> Box:
    return part[0]


def _same_dims(a: Box, b: Box) -> None:
    if len(a.sizes) != len(b.sizes):
        raise LayoutMismatch(
            f"{a} has {len(a.sizes)} dims, {b} has {len(b.sizes)}.", remedy="they are not of one tensor."
        )
