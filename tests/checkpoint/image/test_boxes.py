"""Boxes are index arithmetic: every rule is checked against numpy's own indexing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import LayoutMismatch
from rackrun.checkpoint.image.boxes import Box, cover, overlap_of, runs

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    found = np.zeros(shape, dtype=bool)
    found[index(box)] = True
    return found


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


@given(shapes_with_boxes(2))
def test_an_intersection_is_what_both_hold_and_None_when_that_is_nothing(drawn: tuple[Any, ...]) -> None:
    shape, (a, b) = drawn
    both = mask(shape, a) & mask(shape, b)
    common = a.intersect(b)
    if common is None:
        assert not both.any()
    else:
        assert common.numel > 0
        assert (mask(shape, common) == both).all()
        assert a.contains(common)
        assert b.contains(common)
    assert common == b.intersect(a)


@given(shapes_with_boxes(5))
def test_a_cover_is_disjoint_whole_and_each_piece_lies_in_its_part(drawn: tuple[Any, ...]) -> None:
    shape, (target, *parts) = drawn
    there = np.zeros(shape, dtype=bool)
    for part in parts:
        there |= mask(shape, part)
    wanted = mask(shape, target)
    if (wanted & ~there).any():
        with pytest.raises(LayoutMismatch, match="no part holds"):
            cover(target, list(zip(parts, range(4), strict=True)))
        return
    counted = np.zeros(shape, dtype=int)
    for piece, of in cover(target, list(zip(parts, range(4), strict=True))):
        assert parts[of].contains(piece)
        counted += mask(shape, piece)
    assert (counted == wanted).all()


@given(shapes_with_boxes(4))
def test_where_parts_overlap_the_earlier_one_gives(drawn: tuple[Any, ...]) -> None:
    shape, (target, *parts) = drawn
    given_parts = [*enumerate(parts), (3, Box.whole(shape))]
    owner = np.full(shape, -1)
    for number, part in reversed(given_parts):
        owner[index(part)] = number
    for piece, of in cover(target, [(part, number) for number, part in given_parts]):
        assert (owner[index(piece)] == of).all()


def test_disjoint_parts_give_one_piece_each_in_any_order() -> None:
    grid = [(Box((row, column), (3, 5)), (row, column)) for row in (0, 3, 6) for column in (0, 5)]
    target = Box((1, 2), (7, 7))
    for parts in (grid, grid[::-1], grid[3:] + grid[:3]):
        assert cover(target, parts) == [(target.intersect(box), at) for box, at in parts]


def test_what_is_not_covered_is_named() -> None:
    with pytest.raises(LayoutMismatch, match=r"no part holds \[4:6, 0:3\] of \[0:6, 0:3\]"):
        cover(Box.whole((6, 3)), [(Box((0, 0), (4, 3)), "a")])


def test_a_thousand_parts_in_any_order_are_covered_at_once() -> None:
    parts = [(Box((row * 7 % 1000, 0), (1, 8)), row) for row in range(1000)]
    assert cover(Box.whole((1000, 8)), parts) == parts


def test_nothing_has_to_be_covered_where_there_are_no_elements_and_a_scalar_is_one() -> None:
    assert cover(Box((3,), (0,)), []) == []
    scalar = Box((), ())
    assert scalar.numel == 1
    assert cover(scalar, [(scalar, "a"), (scalar, "b")]) == [(scalar, "a")]
    with pytest.raises(LayoutMismatch):
        cover(scalar, [])


@given(shapes_with_boxes(1), st.sampled_from([1, 2, 8]))
def test_runs_are_the_bytes_of_the_piece_in_order_and_no_two_of_them_touch(
    drawn: tuple[Any, ...], itemsize: int
) -> None:
    shape, (piece,) = drawn
    image = np.arange(int(np.prod(shape)), dtype=f"u{itemsize}").reshape(shape)
    found = list(runs(piece, Box.whole(shape), itemsize))
    raw = image.tobytes()
    assert b"".join(raw[at : at + length] for at, length in found) == image[index(piece)].tobytes()
    assert all(at + length < after for (at, length), (after, _) in itertools.pairwise(found))


def test_a_piece_of_whole_rows_is_one_run() -> None:
    assert list(runs(Box((2, 0, 0), (3, 4, 5)), Box((1, 0, 0), (6, 4, 5)), 4)) == [(80, 240)]
    assert list(runs(Box((), ()), Box((), ()), 8)) == [(0, 8)]
    assert list(runs(Box((0, 0), (0, 3)), Box.whole((4, 3)), 8)) == []


def test_the_first_two_boxes_that_share_an_element_are_found() -> None:
    a, b, c = Box((0,), (4,)), Box((4,), (4,)), Box((7,), (2,))
    assert overlap_of([a, b]) is None
    assert overlap_of([a, b, c]) == (b, c)


def test_negative_numbers_and_unequal_dims_are_no_box() -> None:
    for offsets, sizes in [((-1,), (1,)), ((0,), (-1,)), ((0, 0), (1,))]:
        with pytest.raises(ValueError, match="not a box"):
            Box(offsets, sizes)
    with pytest.raises(LayoutMismatch, match="dims"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
