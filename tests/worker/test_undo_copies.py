"""Where copies of what a step changes go, and when two tensors have the same bits."""

from __future__ import annotations

import math

import pytest
import torch

from rackrun.checkpoint.memory import Ceiling
from rackrun.worker import undo_copies
from rackrun.worker.undo_copies import NoRoom, place_for, same_bits

GB = 10**9


def test_the_lowest_of_all_ceilings_bounds_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = (Ceiling(name, 64 * GB, free, "") for name, free in (("cgroup", GB), ("host", 64 * GB)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(undo_copies, "ceilings", lambda _: [low, high])
    assert place_for(GB // 8, torch.device("cpu")) is None
    with pytest.raises(NoRoom, match="of 1000000000 that are free"):
        place_for(GB, torch.device("cpu"))


def test_where_nothing_says_what_is_free_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo_copies, "ceilings", lambda _: [])
    with pytest.raises(NoRoom):
        place_for(1, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_one_changed_bit_is_seen_wherever_it_is(size: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).to(dtype)
    for index in range(size):
        other = tensor.clone()
        assert same_bits(tensor, other)
        other[index : index + 1].view(torch.uint8)[0] ^= 1
        assert not same_bits(tensor, other), index


def test_bits_are_compared_and_not_values() -> None:
    nan = torch.tensor([math.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))


def test_how_they_lie_in_memory_makes_no_difference() -> None:
    square = torch.arange(9.0).view(3, 3)
    assert same_bits(square, square.t().contiguous().t())
    assert not same_bits(square, square.t())
    assert same_bits(square[:, 1], square[:, 1].clone())
    assert same_bits(square.flatten()[1:5], square.flatten()[1:5].clone()), "at no multiple of 8 bytes"
