"""A journal, open for reading. The job may still run."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rackrun.coordinator.journal.schema import FORMAT
from rackrun.errors import UsageError
from rackrun.protocol.commands import ResumeGeneration

__all__ = ["open_journal", "resume_of"]


@contextmanager
def open_journal(path: Path) -> Iterator[tuple[sqlite3.Connection, dict[str, str]]]:
    """The tables and ``meta``. Raises UsageError when ``path`` is not a journal that this version can read."""
    if not path.is_file():
        raise UsageError(f"there is no journal at {path}.", remedy="name the --out-dir of a run.")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        if meta.get("format") != str(FORMAT):
            raise UsageError(
                f"{path} has format {meta.get('format')}, this rackrun reads format {FORMAT}.",
                remedy="use the version of rackrun that wrote it.",
            )
        yield connection, meta
    except sqlite3.Error as error:
        raise UsageError(
            f"{path} cannot be read as a journal: {error}.", remedy="name the --out-dir of a run."
        ) from error
    finally:
        connection.close()


def resume_of(body: str) -> ResumeGeneration:
    """JSON has no NaN: a gate's (a loss that was none) stands there as null."""
    raw = msgspec.json.decode(body)
    raw["plan"]["gate"] = [math.nan if value is None else value for value in raw["plan"].get("gate", ())]
    return msgspec.convert(raw, ResumeGeneration)
