"""A text of each rank, brought to all ranks without a collective where all have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rackrun.worker.loop.run import Run

__all__ = ["gather_marks", "mark", "of_this_rank", "texts_of_ranks"]

_HASH_BYTES = 6
"""As many as a float64 holds exactly."""


def mark(text: str) -> list[float]:
    """Return two numbers, the length in bytes and a hash, by which ranks compare their texts."""
    data = text.encode()
    return [float(len(data)), float(int.from_bytes(hashlib.blake2b(data, digest_size=_HASH_BYTES).digest(), "little"))]


def gather_marks(run: Run, text: str) -> list[list[float]]:
    """Return the `mark` of every rank's text. Collective."""
    if run.world_size == 1:
        return [mark(text)]
    mine = torch.tensor(mark(text), dtype=torch.float64, device=run.device)
    rows = [torch.empty_like(mine) for _ in range(run.world_size)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def texts_of_ranks(run: Run, text: str, marks: Sequence[Sequence[float]]) -> list[str]:
    """Return the texts of all ranks, or one if all are the same. ``marks``: those of all ranks, for which this rank's
    ``text`` was marked. Collective where the texts differ."""
    if all(list(one) == list(marks[0]) for one in marks):
        return [text]
    longest = int(max(length for length, _ in marks))
    padded = text.encode().ljust(longest, b"\0")
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(run.device)
    rows = [torch.empty_like(mine) for _ in marks]
    dist.all_gather(rows, mine)
    return [bytes(row[: int(length)].cpu().numpy()).decode() for row, (length, _) in zip(rows, marks, strict=True)]


def of_this_rank(run: Run, texts: Sequence[str]) -> str:
    """Return the text of this process's rank."""
    return texts[min(run.rank, len(texts) - 1)]
