"""The fingerprint of a device's memory, whose arithmetic is the same on the host: what it sees, and at which addresses."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from rackrun.worker.tensors.device_digest import BLOCK_WORDS, device_digest, device_digests, factors

BLOCK_BYTES = 4 * BLOCK_WORDS
SIZE = 3 * BLOCK_BYTES + 4 * 1001 + 3
"""Whole blocks, a part of one, and a part of a word."""


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def digest(flat: torch.Tensor) -> int:
    return int(device_digest(flat))


def flipped(flat: torch.Tensor, *bits: int) -> torch.Tensor:
    """``bits`` from the beginning of the memory."""
    other = flat.clone()
    for bit in bits:
        other[bit // 8] ^= 1 << bit % 8
    return other


def test_each_of_64_bits_is_seen_at_any_place() -> None:
    flat = random_bytes(SIZE)
    original = digest(flat)
    words = [0, 1, 2047, 2048, 5000, SIZE // 8 - 2, SIZE // 8 - 1, SIZE // 16]
    unseen = [(word, bit) for word in words for bit in range(64) if digest(flipped(flat, 64 * word + bit)) == original]
    assert not unseen
    tail = [bit for bit in range(8 * (SIZE // 8 * 8), 8 * SIZE) if digest(flipped(flat, bit)) == original]
    assert not tail


@pytest.mark.parametrize("bits", [range(8), [7]], ids=["any bit", "the highest of a byte"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_thousand_changes_of_several_bits_are_seen(count: int, bits: list[int]) -> None:
    draws, flat = random.Random(count), random_bytes(SIZE)
    original = digest(flat)
    for _ in range(1000):
        changed = [8 * place + draws.choice(bits) for place in draws.sample(range(SIZE), count)]
        assert digest(flipped(flat, *changed)) != original, changed


def test_what_has_a_pattern_is_seen() -> None:
    """The same bit in one column, in one row, at the corners of a rectangle, of all words; words and blocks that change places."""
    draws, flat = random.Random(0), random_bytes(SIZE)
    original = digest(flat)
    for bit in (31, 30, 0):
        for _ in range(100):
            (row, other_row), (column, other) = draws.sample(range(3), 2), draws.sample(range(BLOCK_WORDS), 2)
            corners = [
                32 * (r * BLOCK_WORDS + c) + bit for r, c in itertools.product((row, other_row), (column, other))
            ]
            for pattern in (corners, corners[::2], corners[:2]):
                assert digest(flipped(flat, *pattern)) != original, (bit, pattern)
    words = flat[: SIZE // 4 * 4].view(torch.int32)
    for one, two in [(0, 1), (0, BLOCK_WORDS), (3, 2 * BLOCK_WORDS + 3), (BLOCK_WORDS, BLOCK_WORDS + 1)]:
        changed = flat.clone()
        changed[: SIZE // 4 * 4].view(torch.int32)[[one, two]] = words[[two, one]]
        assert digest(changed) != original, (one, two)
    blocks = flat[: 3 * BLOCK_BYTES].view(3, -1)
    assert digest(torch.cat([blocks[[1, 0, 2]].reshape(-1), flat[3 * BLOCK_BYTES :]])) != original


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_negated_value_and_a_negated_tensor_are_seen(dtype: torch.dtype) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = digest(values.view(torch.uint8))
    assert digest((-values).view(torch.uint8)) != original
    for place in range(300):
        other = values.clone()
        other[place] = -other[place]
        assert digest(other.view(torch.uint8)) != original, place


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 7])
def test_a_view_at_any_byte_has_the_digest_of_its_copy(size: int) -> None:
    memory = random_bytes(size + 16)
    for offset in range(16):
        view = memory[offset : offset + size]
        assert digest(view) == digest(view.clone()), offset


def test_how_many_zeros_there_are_is_seen() -> None:
    sizes = [0, 1, 2, 3, 4, 5, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    found = [digest(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    assert len({*found}) == len(sizes)
    assert all(-(2**63) <= one < 2**63 for one in found)


def test_it_is_what_the_definition_says() -> None:
    """In integers without an end: what a kernel has to compute, on whatever device."""

    def mixed(word: int) -> int:
        word &= 2**64 - 1
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    odd = 0x9E3779B97F4A7C15
    factor = [mixed((place + 1) * odd) | 1 for place in range(BLOCK_WORDS)]
    assert [one % 2**64 for one in factors(BLOCK_WORDS, torch.device("cpu")).tolist()] == factor
    flat = random_bytes(2 * BLOCK_BYTES + 6)
    padded = bytes(flat.tolist()) + bytes(BLOCK_BYTES - 6)
    total = len(flat)
    for block in range(3):
        words = [
            int.from_bytes(padded[at : at + 4], "little", signed=True)
            for at in range(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES, 4)
        ]
        summed = sum(word * one for word, one in zip(words, factor, strict=True))
        total += mixed(summed + (block + 1) * odd)
    assert digest(flat) % 2**64 == mixed(total)


def test_many_at_once_have_the_digests_that_they_have_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(5)
    sizes = [0, 1, 3, 4, BLOCK_BYTES, SIZE, 0, *(draws.randrange(3 * BLOCK_BYTES) for _ in range(20)), 0]
    memory = random_bytes(sum(sizes) + len(sizes))
    flats, begin = [], 0
    for size in sizes:
        begin += draws.randrange(2)
        flats.append(memory[begin : begin + size])
        begin += size
    alone = [digest(flat) for flat in flats]
    for at_once in (2**18, 5, 0):
        monkeypatch.setattr("rackrun.worker.tensors.device_digest._BLOCKS_AT_ONCE", at_once)
        assert device_digests(flats).tolist() == alone


INTERPRETED = """
import torch
from rackrun.worker.tensors import device_digest as d
from rackrun.worker.tensors.device_digest_triton import load
device = torch.device("cpu")
kernel = load(device, d.factors(d.BLOCK_WORDS, device), d._sums_by_torch)
assert kernel is not None, "other sums than torch's operations give"
size, draws = 4 * d.BLOCK_WORDS, torch.Generator().manual_seed(1)
memory = torch.randint(0, 256, (50 * size,), dtype=torch.uint8, generator=draws)
sizes = [0, 1, 2, 3, 4, 7, size - 1, size, size + 1, size + 4, 15 * size, 16 * size, 16 * size + 2, 17 * size, 40 * size + 6]
for offset in (0, 4, 8, 16):
    flats = [memory[offset : offset + size] for size in sizes]
    blocks = sum(-(-flat.numel() // size) for flat in flats)
    found, wanted = torch.zeros(blocks, dtype=torch.int64), torch.zeros(blocks, dtype=torch.int64)
    kernel(flats, found)
    d._sums_by_torch(flats, wanted)
    assert torch.equal(found, wanted), offset
"""


def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], check=True, env=environment, timeout=300)
