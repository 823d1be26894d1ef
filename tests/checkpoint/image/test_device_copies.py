"""What a device's tensors become in an image: the same bytes as one after another, by one call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from rackrun.checkpoint.image.device_copies import DeviceCopies
from rackrun.checkpoint.image.image_layout import ImageLayout
from rackrun.checkpoint.image.safetensors_image import plan_image, write_tensors
from rackrun.checkpoint.image.tensor_entries import entries_of

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    return {
        "a": torch.randn(33, 7),
        "b": torch.randn(12, 5).t(),
        "c": torch.randn(9).to(torch.bfloat16),
        "d": torch.tensor(3.5, dtype=torch.float64),
        "e": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "f": torch.tensor([1, 0, 7], dtype=torch.uint8).view(torch.bool),
        "g": conjugate,
        "h": torch.empty(0),
        "i": torch.full((40,), float("nan")),
        "j": torch.arange(1000, dtype=torch.int16),
    }


def planned(tensors: Tensors) -> tuple[ImageLayout, bytearray]:
    entries = [entry for one in tensors.items() for entry in entries_of(dict([one]))]
    layout = plan_image(entries, 0)
    return layout, bytearray(layout.total_bytes)


def cuts_every(size: int) -> Any:
    """As if the memory had been registered in pieces that end at multiples of ``size``."""
    return lambda address, count: [at for at in range(1, count) if (address + at) % size == 0]


@pytest.mark.parametrize("piece", [7, 64, 10**9])
def test_the_bytes_are_those_of_one_tensor_after_another(piece: int, tensors: Tensors) -> None:
    layout, expected = planned(tensors)
    write_tensors(layout, tensors, memoryview(expected))
    found, copies = bytearray(len(expected)), DeviceCopies(cuts_every(piece))
    for _ in range(2):  # the second time by what the first has found out
        found[:] = bytes(len(found))
        copies.enqueue(layout, tensors, tensors.keys(), memoryview(found))
        assert found == expected


@pytest.mark.parametrize("group", [1, 300, 10**9])
def test_a_group_is_there_before_the_next_one_is_begun(group: int, tensors: Tensors) -> None:
    layout, expected = planned(tensors)
    write_tensors(layout, tensors, memoryview(expected))
    found, ends = bytearray(len(expected)), [0]
    for end in DeviceCopies().in_groups(layout, tensors, tensors.keys(), memoryview(found), group):
        assert found[:end] == expected[:end]
        assert end > ends[-1]
        ends.append(end)
    assert found == expected
    whole = sum(1 for one in tensors.values() if one.numel())
    assert len(ends) - 1 == {1: whole, 10**9: 1}.get(group, len(ends) - 1)
    assert len(ends) > 2 or group == 10**9


def test_only_what_is_named_is_written(tensors: Tensors) -> None:
    layout, expected = planned(tensors)
    names = {"a", "j"}
    write_tensors(layout, {name: tensors[name] for name in names}, memoryview(expected))
    found = bytearray(len(expected))
    DeviceCopies().enqueue(layout, tensors, names, memoryview(found))
    DeviceCopies().enqueue(layout, tensors, (), memoryview(found))
    assert found == expected


def test_torch_is_called_once_and_places_are_looked_up_once(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    looked_up: list[int] = []
    foreach = torch._foreach_copy_

    def counted(*args: Any, **how: Any) -> None:
        calls.append(how)
        foreach(*args, **how)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)

    def cuts(address: int, size: int) -> list[int]:
        looked_up.append(size)
        return []

    layout, memory = planned(tensors)
    copies = DeviceCopies(cuts)
    for _ in range(3):
        copies.enqueue(layout, tensors, tensors.keys(), memoryview(memory))
    assert calls == [{"non_blocking": True}] * 3
    assert len(looked_up) == sum(1 for one in tensors.values() if one.numel())


def test_no_torch_call_for_a_single_tensor_is_made_beside_training() -> None:
    """Each gives the interpreter's lock up, which the training thread wants."""
    tensors: Tensors = {f"{i:02}": torch.nn.Parameter(torch.randn(5, 3)) for i in range(20)}
    tensors |= {"half": torch.randn(7).to(torch.bfloat16), "count": torch.arange(3), "no": torch.tensor([True, False])}
    layout, expected = planned(tensors)
    write_tensors(layout, tensors, memoryview(expected))
    found, copies = bytearray(len(expected)), DeviceCopies()
    copies.enqueue(layout, tensors, tensors.keys(), memoryview(found))
    called: list[str] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    found[:] = bytes(len(found))
    with Calls():
        copies.enqueue(layout, tensors, tensors.keys(), memoryview(found))
    many = {name for name in called if called.count(name) > 2}
    assert many <= {"__get__", "is_contiguous"}, "these keep the lock"
    assert called.count("_foreach_copy_") == 1
    assert found == expected
    assert all(place.grad_fn is None for places in copies._kept.values() for place, _ in places._places.values())


def test_a_tensor_that_becomes_strided_is_copied_right(tensors: Tensors) -> None:
    copies = DeviceCopies()
    for matrix in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 4)):
        tensors["a"] = matrix
        layout, expected = planned(tensors)
        write_tensors(layout, tensors, memoryview(expected))
        found = bytearray(len(expected))
        copies.enqueue(layout, tensors, tensors.keys(), memoryview(found))
        assert found == expected


def test_another_layout_in_the_same_memory_is_another_image(tensors: Tensors) -> None:
    copies, memory = DeviceCopies(), bytearray(2**16)
    for chosen in ({"a": tensors["a"], "j": tensors["j"]}, {"b": tensors["b"], "j": tensors["j"] + 1}):
        layout, expected = planned(chosen)
        write_tensors(layout, chosen, memoryview(expected))
        copies.enqueue(layout, chosen, chosen.keys(), memoryview(memory))
        start, stop = layout.extents["j"]
        assert memory[start:stop] == expected[start:stop]


def test_memory_that_goes_is_not_held(tensors: Tensors) -> None:
    class Memory(np.ndarray[Any, Any]):
        """Which a weak reference can be had of."""

    layout, image = planned(tensors)
    memory: Any = np.frombuffer(bytes(len(image)), dtype=np.uint8).copy().view(Memory)
    gone = weakref.ref(memory)
    copies = DeviceCopies()
    copies.enqueue(layout, tensors, tensors.keys(), memoryview(memory))
    del memory
    gc.collect()
    assert gone() is not None
    copies.forget()
    gc.collect()
    assert gone() is None


def test_images_that_have_long_been_written_are_forgotten(tensors: Tensors) -> None:
    layout, image = planned(tensors)
    copies, memories = DeviceCopies(), [bytearray(len(image)) for _ in range(10)]
    for memory in memories:
        copies.enqueue(layout, tensors, tensors.keys(), memoryview(memory))
    assert len(copies._kept) == 4
