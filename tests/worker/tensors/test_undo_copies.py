"""Where copies of what a step changes go, and when two tensors have the same bits."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn

from rackrun.checkpoint.arena.memory_plan import Ceiling
from rackrun.worker.tensors import undo_copies
from rackrun.worker.tensors.undo_copies import NoMemoryForCopies, UndoCopies, place_for, same_bits

GB = 10**9


def test_the_lowest_of_all_ceilings_bounds_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = (Ceiling(name, 64 * GB, free, "") for name, free in (("cgroup", GB), ("host", 64 * GB)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(undo_copies, "ceilings", lambda _: [low, high])
    assert place_for(GB // 8, torch.device("cpu")) is None
    with pytest.raises(NoMemoryForCopies, match="and 1000000000 bytes are free"):
        place_for(GB, torch.device("cpu"))


def test_where_nothing_says_what_is_free_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo_copies, "ceilings", lambda _: [])
    with pytest.raises(NoMemoryForCopies):
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


KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
]


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Every pattern of bits that eight random bytes can be, NaNs with a payload among them; of several shapes and strides."""
    made = {}
    for number, dtype in enumerate(KINDS):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (8 * 36,), dtype=torch.uint8)
        flat = raw.view(dtype)[: 36 // 2]
        made[f"{dtype} flat"], made[f"{dtype} square"] = flat, flat[: 3 * (number % 3 + 1)].view(3, -1).t()
    return {**made, "empty": torch.empty(0), "number": torch.tensor(math.nan), "parameter": nn.Parameter(torch.ones(2))}


def test_copies_of_many_kinds_are_taken_bit_for_bit_and_again_into_the_same_memory() -> None:
    torch.manual_seed(0)
    copies, places = UndoCopies(), set[int]()
    for _ in range(3):
        tensors = of_all_kinds()
        copies.begin()
        assert copies.take(tensors) == sum(tensor.nbytes for tensor in tensors.values())
        assert all(copies.equals(path, tensor) for path, tensor in tensors.items())
        assert copies.outdated(tensors) == []
        places |= {copies.value(path).data_ptr() for path in tensors}
    assert len(places) <= len(tensors)


def test_a_tensor_that_was_written_to_or_lies_elsewhere_is_outdated() -> None:
    tensors = {str(number): torch.zeros(4, 4) for number in range(6)}
    copies = UndoCopies()
    copies.take(tensors)
    tensors["1"].add_(1)
    tensors["2"].set_(torch.zeros(4, 4))  # type: ignore[call-overload]
    tensors["3"].t_()
    tensors["4"] = tensors["4"].double()
    assert copies.outdated({**tensors, "new": torch.zeros(1)}) == ["1", "2", "3", "4", "new"]


def test_memory_that_a_tensor_has_left_is_not_given_to_another_that_would_pass_for_it() -> None:
    tensor = torch.zeros(1000)
    copies = UndoCopies()
    copies.take({"it": tensor})
    tensor.data = torch.empty(0)
    tensor.data = torch.ones(1000)  # where the first was, if nobody held that
    assert copies.outdated({"it": tensor}) == ["it"]


def test_memory_of_copies_that_are_not_wanted_is_given_back() -> None:
    copies = UndoCopies()
    copies.take({str(number): torch.zeros(2) for number in range(3)})
    value = weakref.ref(copies.value("1"))
    copies.keep_only(["0", "2"])
    assert "1" not in copies
    assert not copies.is_fresh("1")
    assert value() is None
