"""The process of one sink: ``python -m rackrun.coordinator.sinks.sink_child FD OPENING``.

Lines on standard input are items of `rackrun.coordinator.sinks.sink.line_of`; answers go to descriptor FD. It writes,
flushes at most once a second, saves the position, and says how far it is. If anything fails it says why and ends: the
coordinator starts another, which goes on after the saved position. It ends when its input does, so that it also
delivers what a launcher that was killed has sent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from rackrun.coordinator.sinks.position_file import PositionFile
from rackrun.coordinator.sinks.sink import Key, Opening, Record, Refused, Rewind, Sink, end_of, item_from
from rackrun.coordinator.sinks.sink_messages import FINISH, Closed, Delivered, Failed, Note, Opened, Said
from rackrun.coordinator.sinks.targets import make_sink
from rackrun.coordinator.user_code.child_setup import open_pipes

__all__ = ["Feed", "main"]

_FLUSH_S = 1.0
_BATCH = 256
_WHY_CHARS_MAX = 300
_DRAIN_S = 10
"""Seconds for what is left when the coordinator is gone."""


class Feed:
    """Writes items to an open sink, each record once."""

    def __init__(self, sink: Sink, newest: Key | None) -> None:
        self._sink = sink
        self.newest = newest
        """The newest record that was written; what is not newer is not written again."""
        self.refused, self.why = 0, ""

    def take(self, item: Record | Rewind) -> str:
        """Write an item. Return a text for people, or ""."""
        if isinstance(item, Rewind):
            said = self._sink.rewind(item.step)
            if self.newest is not None:
                self.newest = min(self.newest, end_of(item.step))
            return said
        if self.newest is None or item.key > self.newest:
            try:
                self._sink.write(item)
            except Refused as refused:
                self._refuse(refused)
            self.newest = item.key
        return ""

    def flush(self) -> None:
        try:
            self._sink.flush()
        except Refused as refused:
            self._refuse(refused)

    def _refuse(self, refused: Refused) -> None:
        self.refused += refused.records
        self.why = str(refused)


class _Lines:
    """Lines from a pipe, as many as come within a time."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._fd = pipe.fileno()
        self._rest = b""
        self._ended = False

    def some(self) -> list[bytes]:
        """Wait for a line, then for others, up to a second. An empty list: the input has ended."""
        found: list[bytes] = []
        deadline = None
        while len(found) < _BATCH and FINISH not in found and not self._ended:
            wait_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not select.select([self._fd], [], [], wait_s)[0]:
                break
            data = os.read(self._fd, 1 << 16)
            if not data:
                self._ended = True
                signal.alarm(_DRAIN_S)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += lines
            if found and deadline is None:
                deadline = time.monotonic() + _FLUSH_S
        return found


def main() -> int:
    pipes = open_pipes(int(sys.argv[1]), outlives_parent=True)
    opening = msgspec.json.decode(sys.argv[2], type=Opening)

    def say(message: Said) -> None:
        try:
            pipes.up.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            signal.alarm(_DRAIN_S)  # the coordinator is gone

    try:
        positions = PositionFile(Path(opening.directory) / "sinks", f"{opening.kind}:{opening.target}")
        _print_to(positions.log)
        _run(opening, positions, pipes.down, say)
    except BaseException as error:  # noqa: BLE001 - a library may raise anything
        traceback.print_exc()
        say(Failed(f"{type(error).__name__}: {str(error) or 'no reason was given'}"[:_WHY_CHARS_MAX]))
        return 1
    return 0


def _print_to(path: Path) -> None:
    """Let libraries print to a file: what they say is not about the training."""
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run(opening: Opening, positions: PositionFile, down: BinaryIO, say: Callable[[Said], None]) -> None:
    saved = None if opening.fresh else positions.load()
    if saved is not None and saved.training != opening.run_id:
        opening = msgspec.structs.replace(opening, run_id=saved.training)
    sink = make_sink(opening)
    feed = Feed(sink, sink.begin(saved.newest if saved else None, saved.run if saved else ""))
    positions.save(opening.run_id, sink.run, feed.newest)
    say(Opened())
    lines = _Lines(down)
    while found := lines.some():
        seq = 0
        for line in found:
            if line == FINISH:
                break
            seq, item = item_from(line)
            if text := feed.take(item):
                say(Note(text))
        feed.flush()
        positions.save(opening.run_id, sink.run, feed.newest)
        if seq:
            say(Delivered(seq, feed.refused, feed.why))
            feed.refused = 0
        if FINISH in found:
            break
    if text := sink.close():
        say(Note(text))
    say(Closed())


if __name__ == "__main__":
    sys.exit(main())
