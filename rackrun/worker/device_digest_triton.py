"""`rackrun.worker.device_digest` for a GPU, in one pass over memory. Importing it takes Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["load"]

_BLOCK = 4096
_ROUNDS = 16
"""Blocks for each program: the factors stay in its registers."""


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _sum_blocks(words, factors, sums, blocks, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 - Triton's own notation
    at = tl.arange(0, BLOCK)
    factor = tl.load(factors + at)
    first = tl.program_id(0).to(tl.int64) * ROUNDS
    for block in range(first, min(first + ROUNDS, blocks)):
        word = tl.load(words + block * BLOCK + at)
        tl.store(sums + block, tl.sum(word.to(tl.int64) * factor, axis=0))


def load(
    device: torch.device, factors: torch.Tensor, reference: Callable[[torch.Tensor, torch.Tensor], None]
) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """None unless it computes on ``device`` what ``reference`` does."""

    def sum_blocks(words: torch.Tensor, into: torch.Tensor) -> None:
        blocks = len(into)
        _sum_blocks[(triton.cdiv(blocks, _ROUNDS),)](
            words, factors, into, blocks, BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=8, enable_fp_fusion=False
        )

    words = (torch.arange(3 * _BLOCK, dtype=torch.int64, device=device) * -7046029254386353131 >> 31).to(torch.int32)
    found, wanted = (torch.empty(3, dtype=torch.int64, device=device) for _ in range(2))
    sum_blocks(words, found)
    reference(words, wanted)
    return sum_blocks if found.tolist() == wanted.tolist() else None
