"""Opening a journal for reading, even while the job runs."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rackrun.coordinator.journal.schema import READABLE
from rackrun.errors import UsageError
from rackrun.protocol.commands import ResumeGeneration, SetTimer
from rackrun.protocol.events import TimerFired
from rackrun.protocol.timers import timer_named

__all__ = ["as_of_today", "open_journal", "resume_of"]


@contextmanager
def open_journal(path: Path) -> Iterator[tuple[sqlite3.Connection, dict[str, str]]]:
    """Open a journal and yield the connection and its ``meta`` table. Raises UsageError if this version cannot read
    it."""
    if not path.is_file():
        raise UsageError(f"there is no journal at {path}.", remedy="name the --out-dir of a run.")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        if meta.get("format") not in [str(one) for one in READABLE]:
            readable = " and ".join(map(str, READABLE))
            raise UsageError(
                f"{path} has format {meta.get('format')}, this rackrun reads the formats {readable}.",
                remedy="use the version of rackrun that wrote it.",
            )
        yield connection, meta
    except sqlite3.Error as error:
        raise UsageError(
            f"{path} cannot be read as a journal: {error}.", remedy="name the --out-dir of a run."
        ) from error
    finally:
        connection.close()


def as_of_today(body: str) -> str:
    """Return the JSON of an event or a command in today's form: in format 3, timers are texts.

    Raises ValueError if the text names no timer.
    """
    kind = TimerFired if '"TimerFired"' in body else SetTimer if '"SetTimer"' in body else None
    if kind is None or '"name":' not in body:
        return body
    raw = msgspec.json.decode(body)
    raw["timer"] = msgspec.to_builtins(timer_named(raw.pop("name")))
    return msgspec.json.encode(msgspec.convert(raw, kind)).decode()


def resume_of(body: str) -> ResumeGeneration:
    """Decode a `ResumeGeneration`. JSON has no NaN, so null in its gate (a loss that was NaN) is restored to NaN."""
    raw = msgspec.json.decode(body)
    raw["plan"]["gate"] = [math.nan if value is None else value for value in raw["plan"].get("gate", ())]
    return msgspec.convert(raw, ResumeGeneration)
