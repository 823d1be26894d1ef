"""A fingerprint of bytes on a device, where there is no checksum: equal for equal bytes, and on every device of one kind.

The bytes are words of 32 bits, in blocks of 4096. The sum of a block is that of its words, each times an odd factor of its own, in
64 bits: every single bit is seen, and two changes cancel only where their factors happen to. The sums of blocks are mixed with their place,
and only then added, so nothing that repeats from block to block cancels. (Multiplicative hashing: Lemire and Kaser, "Strongly universal string
hashing is fast", 2014; the mixing is splitmix64's finaliser: Steele, Lea and Flood, 2014.)

A kernel computes the same with one pass over memory (`rackrun.worker.device_digest_triton`); torch's operations need several, and some memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

__all__ = ["BLOCK_WORDS", "BlockSums", "device_digest", "factors"]

BLOCK_WORDS = 4096
_SLICE_BLOCKS = 1024
"""So many blocks at once: 16 MiB, for which torch's operations need twice as much for a while."""
_ODD = -7046029254386353131
"""2**64 divided by the golden ratio."""


BlockSums = Callable[[torch.Tensor, torch.Tensor], None]
"""Of words, int32, (blocks * `BLOCK_WORDS`,), into sums, int64, (blocks,)."""


def device_digest(flat: torch.Tensor) -> torch.Tensor:
    """Of ``flat``, uint8, (bytes,), at any address: an int64 scalar on its device, without waiting for it."""
    size, device = flat.numel(), flat.device
    if flat.data_ptr() % 4:
        flat = flat.clone()
    whole = size // (4 * BLOCK_WORDS)
    cut = whole * 4 * BLOCK_WORDS
    blocks = whole + (size > cut)
    sums = torch.empty(blocks, dtype=torch.int64, device=device)
    if whole:
        _block_sums(device)(flat[:cut].view(torch.int32), sums[:whole])
    if size > cut:
        rest = torch.zeros(4 * BLOCK_WORDS, dtype=torch.uint8, device=device)
        rest[: size - cut].copy_(flat[cut:])
        _sums_by_torch(rest.view(torch.int32), sums[whole:])
    places = torch.arange(1, blocks + 1, dtype=torch.int64, device=device) * _ODD
    return _mixed(_mixed(sums + places).sum() + size)


def factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, int64, (count,)."""
    return _mixed(torch.arange(1, count + 1, dtype=torch.int64, device=device) * _ODD) | 1


def _sums_by_torch(words: torch.Tensor, into: torch.Tensor) -> None:
    factor = _factors_of_block(words.device)
    for start in range(0, len(into), _SLICE_BLOCKS):
        some = words[start * BLOCK_WORDS : (start + _SLICE_BLOCKS) * BLOCK_WORDS].view(-1, BLOCK_WORDS)
        torch.sum(some * factor, 1, out=into[start : start + _SLICE_BLOCKS])


@functools.cache
def _factors_of_block(device: torch.device) -> torch.Tensor:
    return factors(BLOCK_WORDS, device)


@functools.cache
def _block_sums(device: torch.device) -> BlockSums:
    """The kernel, where there is one that computes what torch's operations do."""
    if device.type == "cuda" and os.environ.get("RACKRUN_KERNELS") != "0":
        try:
            from rackrun.worker.device_digest_triton import load
        except ImportError:
            return _sums_by_torch
        return load(device, _factors_of_block(device), _sums_by_torch) or _sums_by_torch
    return _sums_by_torch


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * -4658895280553007687
    words = (words ^ _shifted(words, 27)) * -7723592293110705685
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as if there were no sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)
