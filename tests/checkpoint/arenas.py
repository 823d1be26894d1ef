"""Small arenas with contents that are a function of the checkpoint."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

from rackrun.checkpoint.arena.arena import Arena

__all__ = ["CHUNK", "JOB", "ROOM", "content", "create", "read", "save", "states"]

JOB = "run-42"
ROOM, CHUNK = 150, 64


def create(path: Path | int, **changed: Any) -> Arena:
    given = {
        "job": JOB,
        "rank": 3,
        "fencing_token": 1,
        "slots": 2,
        "payload_bytes": ROOM,
        "chunk_bytes": CHUNK,
        **changed,
    }
    return Arena.create(path, **given)


def content(number: int, size: int = ROOM) -> bytes:
    return random.Random(number).randbytes(size)


def save(arena: Arena, number: int, *, commit: bool = True, size: int = ROOM, **which: Any) -> int:
    writer = arena.begin(number, number * 10, **which)
    writer.payload[:size] = content(number, size)
    writer.seal(size, f"layout-{size}")
    if commit:
        arena.commit(number)
    return writer.index


def read(arena: Arena, number: int, **which: Any) -> bytes:
    reader = arena.reader(number, **which)
    reader.verify()
    return bytes(reader.payload)


def states(arena: Arena) -> list[tuple[str, int]]:
    return [(slot.state.name, slot.number) for slot in arena.slots()]


def digesting() -> list[threading.Thread]:
    """The threads that compute digests now."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("rackrun-digest")]
