"""Digests bytes on a device: equal for equal bytes, and the same on every device of one kind.

The bytes are words of 32 bits in blocks of 4096. The sum of a block is that of its words, each multiplied by an odd
factor of its own, in 64 bits. Every single changed bit changes the sum, and two changes cancel only if their factors
happen to fit. The sums of blocks are mixed with their positions before they are added, so nothing that repeats from
block to block cancels. (Multiplicative hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014;
the mixing is splitmix64's finaliser: Steele, Lea and Flood, 2014.)

A kernel computes the same in one pass over memory (`rackrun.worker.tensors.device_digest_triton`); torch's operations
need several passes, and some memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["BLOCK_WORDS", "BlockSums", "device_digest", "device_digests", "factors"]

BLOCK_WORDS = 4096
_BLOCK_BYTES = 4 * BLOCK_WORDS
_SLICE_BLOCKS = 1024
"""Number of blocks summed at once: 16 MiB, for which torch's operations need twice as much memory for a while."""
_BLOCKS_AT_ONCE = 2**18
"""Number of blocks digested at once, of many tensors: 4 GiB. Their sums take a few times 2 MiB."""
_ODD = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed 64-bit integer."""


BlockSums = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Function that writes the block sums of byte tensors (uint8, addresses that are multiples of 4) into an int64 tensor
of shape (blocks,), tensor by tensor. The last block of each tensor may be partial."""


def device_digest(flat: torch.Tensor) -> torch.Tensor:
    """Return the digest of ``flat``, uint8 of shape (bytes,) at any address: an int64 scalar on its device, without
    waiting for it."""
    return device_digests([flat])[0]


def device_digests(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digests of ``flats``, each as for `device_digest` and all on one device: int64 of shape (len(flats),).
    The host's work hardly grows with their number."""
    return torch.cat([_digests(some) for some in _in_groups(flats)])


def _in_groups(flats: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    begin = blocks = 0
    for at, flat in enumerate(flats):
        if blocks > _BLOCKS_AT_ONCE:
            yield flats[begin:at]
            begin, blocks = at, 0
        blocks += _blocks(flat)
    yield flats[begin:]


def _digests(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    device, counts = flats[0].device, [_blocks(flat) for flat in flats]
    sums = torch.empty(sum(counts), dtype=torch.int64, device=device)
    if len(sums):
        _block_sums(device)([flat.clone() if flat.data_ptr() % 4 else flat for flat in flats], sums)
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    described = torch.tensor([counts, ends[:-1], ends[1:], [flat.numel() for flat in flats]])
    if device.type == "cuda":
        described = described.pin_memory().to(device, non_blocking=True)
    count, begin, end, size = described
    places = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=device)
    places -= torch.repeat_interleave(begin, count, output_size=len(sums))
    totals = torch.zeros(len(sums) + 1, dtype=torch.int64, device=device)  # sums of all blocks before, modulo 2**64
    torch.cumsum(_mixed(sums + places * _ODD), 0, out=totals[1:])
    return _mixed(totals[end] - totals[begin] + size)


def _blocks(flat: torch.Tensor) -> int:
    return -(-flat.numel() // _BLOCK_BYTES)


def factors(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern, int64 of shape (count,)."""
    return _mixed(torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD) | 1


def _sums_by_torch(flats: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    done = 0
    for flat in flats:
        whole = flat.numel() // _BLOCK_BYTES
        cut = whole * _BLOCK_BYTES
        if whole:
            _sums_of_words(flat[:cut].view(torch.int32), into[done : done + whole])
            done += whole
        if flat.numel() > cut:
            rest = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=flat.device)
            rest[: flat.numel() - cut].copy_(flat[cut:])
            _sums_of_words(rest.view(torch.int32), into[done : done + 1])
            done += 1


def _sums_of_words(words: torch.Tensor, into: torch.Tensor) -> None:
    factor = _factors_of_block(words.device)
    for start in range(0, len(into), _SLICE_BLOCKS):
        some = words[start * BLOCK_WORDS : (start + _SLICE_BLOCKS) * BLOCK_WORDS].view(-1, BLOCK_WORDS)
        torch.sum(some * factor, 1, out=into[start : start + _SLICE_BLOCKS])


@functools.cache
def _factors_of_block(device: torch.device) -> torch.Tensor:
    return factors(BLOCK_WORDS, device)


@functools.cache
def _block_sums(device: torch.device) -> BlockSums:
    """Return the kernel for ``device`` if there is one that computes the same as torch's operations, else those
    operations."""
    if device.type == "cuda" and os.environ.get("RACKRUN_KERNELS") != "0":
        try:
            from rackrun.worker.tensors.device_digest_triton import load
        except ImportError:
            return _sums_by_torch
        return load(device, _factors_of_block(device), _sums_by_torch) or _sums_by_torch
    return _sums_by_torch


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * -4658895280553007687
    words = (words ^ _shifted(words, 27)) * -7723592293110705685
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Return the words shifted to the right as unsigned numbers."""
    return (words >> by) & ((1 << (64 - by)) - 1)
