"""Texts of each rank, brought to all ranks: without a collective where all are known to have the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rackrun.worker.loop.run import Run

__all__ = [
    "MARK",
    "NoRoomError",
    "from_rank_0",
    "gather_marks",
    "gather_texts",
    "mark",
    "numbers_of_text",
    "of_rank",
    "room_for_text",
    "texts_of_numbers",
    "texts_of_ranks",
    "without_copies",
]

MARK = 2
"""Numbers in a `mark`."""
_FIRST, _LENGTH = 8192, 8
"""Sizes of the message that every rank sends first, and of the length at its beginning, in bytes."""
_NUMBER_BYTES = 6
"""As many as a float64 holds exactly."""
_GROWS_BYTES = 250
"""How much a text may grow in a step beside a quarter."""


class NoRoomError(Exception):
    """A text has ``longest`` bytes, more than there is room for."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self.longest = longest


def mark(text: str) -> list[float]:
    """Return two numbers, the length in bytes and a hash, by which ranks compare their texts."""
    data = text.encode()
    return [
        float(len(data)),
        float(int.from_bytes(hashlib.blake2b(data, digest_size=_NUMBER_BYTES).digest(), "little")),
    ]


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


def room_for_text(longest: float) -> int:
    """Return how many numbers `numbers_of_text` takes where texts had up to ``longest`` bytes last, and may have grown."""
    return MARK + -(-int(longest * 1.25 + _GROWS_BYTES) // _NUMBER_BYTES)


def numbers_of_text(text: str, room: int) -> list[float]:
    """Return a text as ``room`` numbers: its `mark`, and its bytes where there is room for them."""
    data = text.encode().ljust((room - MARK) * _NUMBER_BYTES, b"\0")
    return mark(text) + [
        float(int.from_bytes(data[first : first + _NUMBER_BYTES], "little"))
        for first in range(0, (room - MARK) * _NUMBER_BYTES, _NUMBER_BYTES)
    ]


def texts_of_numbers(rows: Sequence[Sequence[float]], text: str) -> list[str]:
    """Return the texts of all ranks from their `numbers_of_text`, or this rank's ``text`` alone if all are the same.
    Raises `NoRoomError` if one is too long for its row."""
    if all(tuple(row[:MARK]) == tuple(rows[0][:MARK]) for row in rows):
        return [text]
    longest = int(max(row[0] for row in rows))
    if longest > (len(rows[0]) - MARK) * _NUMBER_BYTES:
        raise NoRoomError(longest)
    contents = (b"".join(int(number).to_bytes(_NUMBER_BYTES, "little") for number in row[MARK:]) for row in rows)
    return [content[: int(row[0])].decode() for content, row in zip(contents, rows, strict=True)]


def of_rank(texts: Sequence[str], rank: int) -> str:
    """Return the text of ``rank`` from a list that has one for each rank, or one that all have."""
    return texts[min(rank, len(texts) - 1)]


def without_copies(texts: Sequence[str]) -> list[str]:
    """Return ``texts``, or the first alone if all are the same."""
    return [texts[0]] if all(text == texts[0] for text in texts) else list(texts)


def gather_texts(run: Run, texts: Sequence[str]) -> list[list[str]]:
    """Return the ``texts`` of every rank. Collective: one where all are short, else two."""
    if run.world_size == 1:
        return [list(texts)]
    mine = zlib.compress(json.dumps(texts).encode(), 1)
    rows = _gather_bytes(run, len(mine).to_bytes(_LENGTH, "little") + mine[: _FIRST - _LENGTH], _FIRST)
    lengths = [min(int.from_bytes(row[:_LENGTH], "little"), 2**28) for row in rows]
    found = [row[_LENGTH : _LENGTH + length] for row, length in zip(rows, lengths, strict=True)]
    if max(*lengths, len(mine)) > _FIRST - _LENGTH:
        found = [
            row[:length]
            for row, length in zip(_gather_bytes(run, mine, max(*lengths, len(mine))), lengths, strict=True)
        ]
    with contextlib.suppress(ValueError, zlib.error):
        return [json.loads(zlib.decompress(one)) for one in found]
    return [list(texts)] * run.world_size  # of an attempt that will not count: a rank was lost in it


def _gather_bytes(run: Run, mine: bytes, size: int) -> list[bytes]:
    """Return ``size`` bytes of every rank: its ``mine``, and zeros after it. Collective."""
    content = torch.zeros(size, dtype=torch.uint8)
    content[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    content = content.to(run.device)
    contents = [torch.zeros_like(content) for _ in range(run.world_size)]
    dist.all_gather(contents, content)
    return [bytes(one.cpu().numpy()) for one in contents]


def from_rank_0(run: Run, text: str) -> str:
    """Return rank 0's ``text``. Collective."""
    if run.world_size == 1:
        return text
    mine = text.encode()
    size = torch.tensor([len(mine)], device=run.device)
    dist.broadcast(size, 0)
    content = torch.zeros(int(size.item()), dtype=torch.uint8)
    if run.rank == 0:
        content = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else content
    content = content.to(run.device)
    dist.broadcast(content, 0)
    return bytes(content.cpu().numpy()).decode()
