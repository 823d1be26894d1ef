"""What a sink is: it takes the values of committed steps, once and in order, and says where it is."""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

__all__ = ["Key", "Opening", "Record", "Refused", "Rewind", "Sink", "Value", "end_of", "item_from", "line_of"]

Value = float | int | str


class Key(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The place of a record: the ``call``-th ``run.log`` in a step or in a phase after it. Keys are ordered as steps
    are done."""

    step: int
    phase: int = 0
    call: int = 0


def end_of(step: int) -> Key:
    """Return the last key of ``step`` itself: its phases are done again when all go back to a snapshot of it."""
    return Key(step, 0, 1 << 30)


class Record(msgspec.Struct, frozen=True):
    """The values of one ``run.log``."""

    key: Key
    time_s: float
    """Unix time at which the coordinator received them."""
    values: dict[str, Value]


class Rewind(msgspec.Struct, frozen=True):
    """What was written after ``step`` was wrong, and other values follow for the same steps."""

    step: int


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink is opened with."""

    kind: str
    target: str
    """The part of ``--log-to`` after the kind."""
    run_id: str
    directory: str
    """The run's output directory."""
    fresh: bool
    """Whether the training begins at step 0, so that what the target holds is another training's."""
    first_step: int
    """The first step of this job; after a resume from a checkpoint it is not 0."""


class Refused(Exception):
    """The target never takes these records, so it is of no use to send them again. ``records``: how many."""

    def __init__(self, why: str, records: int = 1) -> None:
        super().__init__(why)
        self.records = records


class Sink(Protocol):
    """One target that takes values. Any method may raise any exception: the sink is then opened again later, and goes
    on after the last record that was flushed."""

    @property
    def run(self) -> str:
        """The name of the target's run, which a resumed job is opened with again; "": it has none."""

    def begin(self, newest: Key | None, run: str) -> Key | None:
        """Open the target. Return the newest record that it holds; None: none, or it does not know.

        ``newest`` and ``run`` are what was last saved about this target; None and "": nothing was.
        """

    def write(self, record: Record) -> None:
        """Take a record. It may be kept until `flush`. Raises `Refused` if it can never be taken."""

    def flush(self) -> None:
        """Return when all records are where they belong."""

    def rewind(self, step: int) -> str:
        """Take back what was written after ``step``. Return what of it stays, for people; "": nothing."""

    def close(self) -> str:
        """Finish the run. Return what is left to do, for people; "": nothing."""


def line_of(seq: int, item: Record | Rewind) -> bytes:
    """Return an item as a line of JSON, with Python's NaN and Infinity."""
    if isinstance(item, Rewind):
        return json.dumps([seq, item.step]).encode()
    key = item.key
    return json.dumps([seq, [key.step, key.phase, key.call], item.time_s, item.values]).encode()


def item_from(line: bytes) -> tuple[int, Record | Rewind]:
    """Return the number and the item of a line that `line_of` has made."""
    seq, what, *rest = json.loads(line)
    if not rest:
        return seq, Rewind(what)
    time_s: float = rest[0]
    values: dict[str, Any] = rest[1]
    return seq, Record(Key(*what), time_s, values)
