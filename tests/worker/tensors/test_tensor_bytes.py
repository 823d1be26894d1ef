"""A tensor's bytes: where it is one dense block, in which order they lie, and fingerprints that see what has changed."""

from __future__ import annotations

import pytest
import torch

from rackrun.worker.tensors import tensor_bytes
from rackrun.worker.tensors.tensor_bytes import copy_bytes, dense_bytes, digest, digests, pack

SQUARE = torch.arange(12.0).view(3, 4)
IMAGES = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.zeros(0, 4),
        SQUARE,
        SQUARE.t(),
        SQUARE[1:],
        SQUARE[1:].t(),
        IMAGES.contiguous(memory_format=torch.channels_last),
        IMAGES.permute(3, 0, 2, 1),
        torch.zeros(3, 1, 2).as_strided((3, 1, 2), (1, 99, 3)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_dense_block_is_seen_as_its_bytes_in_the_order_of_the_storage(tensor: torch.Tensor) -> None:
    found = dense_bytes(tensor)
    assert found is not None
    assert (found.dtype, found.shape, found.data_ptr()) == (torch.uint8, (tensor.nbytes,), tensor.data_ptr())
    if tensor.numel():
        start = tensor.storage_offset() * tensor.itemsize
        whole = bytes(tensor.untyped_storage().tolist())
        assert bytes(found.tolist()) == whole[start : start + tensor.nbytes]


@pytest.mark.parametrize(
    "tensor",
    [SQUARE[:, 1], SQUARE[:, 1:], SQUARE[::2], SQUARE.t()[1:], torch.zeros(1).expand(3)],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_what_has_gaps_or_overlaps_is_no_dense_block(tensor: torch.Tensor) -> None:
    assert dense_bytes(tensor) is None


def test_a_digest_is_of_the_bytes_and_their_number_however_the_tensor_lies() -> None:
    one = SQUARE[:, 1]
    assert digest(one) == digest(one.contiguous())
    assert digest(torch.zeros(2)) != digest(torch.zeros(3)), "their number"
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(2)) == digest(torch.zeros(1, dtype=torch.int64)), "no type is looked at"
    assert digests([one, SQUARE]) == [digest(one), digest(SQUARE)]
    assert digests([]) == []
    assert digest(torch.nn.Parameter(one)) == digest(one)


def test_digests_of_much_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by several threads, in the order in which they were asked for."""
    monkeypatch.setattr(tensor_bytes, "_SHARED_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(5))
    many = [torch.arange(size, dtype=torch.float32) for size in range(60)]
    assert digests(many) == [digest(one) for one in many]


def test_what_is_packed_comes_back_into_tensors_of_any_layout() -> None:
    given = [SQUARE.t(), torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor(7, dtype=torch.int64), SQUARE[:, 1]]
    packed = pack(given, torch.device("cpu"))
    assert packed.nbytes == sum(tensor.nbytes for tensor in given)
    into = [
        torch.zeros(3, 4).t(),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(3),
    ]
    copy_bytes(packed, into)
    assert all(map(torch.equal, into, given))
    assert pack([], torch.device("cpu")).shape == (0,)
