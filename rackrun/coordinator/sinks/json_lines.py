"""``jsonl:PATH``: a line of JSON for each ``run.log``. The file itself says how far it is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rackrun.coordinator.sinks.position_file import lock
from rackrun.coordinator.sinks.sink import Key, Opening, Record, Value, end_of

__all__ = ["JsonLines", "as_line", "newest_in"]

_BLOCK_BYTES = 1 << 12
_OWN = ("step", "phase", "time")


class JsonLines:
    """A file to which lines are appended."""

    run = ""

    def __init__(self, opening: Opening) -> None:
        self._path = Path(opening.target)
        self._fresh = opening.fresh
        self._fd = -1
        self._lines: list[bytes] = []

    def begin(self, newest: Key | None, run: str) -> Key | None:  # noqa: ARG002 - the file knows better
        """Open the file, and cut a last line that was not written whole. Another training's file gets another name."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        if self._fresh and os.fstat(self._fd).st_size:
            self._path.rename(_free_name(self._path))
            os.close(self._fd)
            self._open()
        try:
            found = newest_in(self._fd)
        except ValueError:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, _end_of_lines(self._fd, os.fstat(self._fd).st_size))
        return found

    def write(self, record: Record) -> None:
        self._lines.append(as_line(record))

    def flush(self) -> None:
        """Append the lines. What a full disk has taken of them is cut off again, so that no line is torn."""
        size = os.fstat(self._fd).st_size
        data = memoryview(b"".join(self._lines))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise
        self._lines.clear()

    def rewind(self, step: int) -> str:
        """Cut the lines of later steps off."""
        self.flush()
        for offset, line in _lines_backwards(self._fd):
            if _key_of(line) <= end_of(step):
                break
            os.ftruncate(self._fd, offset)
        return ""

    def close(self) -> str:
        os.close(self._fd)
        return ""

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        lock(self._fd, self._path)


def as_line(record: Record) -> bytes:
    """Return ``{"step": 12, "time": 1764315506.25, "loss": 2.31}`` with a line end.

    ``phase`` is there if it is not 0. NaN and infinities, which JSON does not have, are texts. A value of the script
    with one of our names gets the prefix ``log.``.
    """
    line: dict[str, Any] = {"step": record.key.step}
    if record.key.phase:
        line["phase"] = record.key.phase
    line["time"] = round(record.time_s, 3)
    for name, value in record.values.items():
        line[f"log.{name}" if name in _OWN else name] = _plain(value)
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"


def newest_in(fd: int) -> Key | None:
    """Return the key of the last line of a file; None: it is empty. Raises ValueError if it is no such file."""
    newest, call = None, 0
    for _, line in _lines_backwards(fd):
        key = _key_of(line)
        if newest is None:
            newest = key
        elif key == newest:
            call += 1
        else:
            break
    return None if newest is None else Key(newest.step, newest.phase, call)


def _plain(value: Value) -> Value:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _key_of(line: bytes) -> Key:
    """Return step and phase of a line."""
    try:
        found = json.loads(line)
        return Key(int(found["step"]), int(found.get("phase", 0)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("its last lines are not such as --log-to writes") from error


def _end_of_lines(fd: int, end: int) -> int:
    """Return the offset after the last line end in the first ``end`` bytes; 0: there is none."""
    while end:
        begin = max(end - _BLOCK_BYTES, 0)
        at = os.pread(fd, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def _lines_backwards(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and text of each whole line, the last first."""
    end = _end_of_lines(fd, os.fstat(fd).st_size)
    while end:
        begin = _end_of_lines(fd, end - 1)
        yield begin, os.pread(fd, end - 1 - begin, begin)
        end = begin


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free
