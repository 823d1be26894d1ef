"""Replay a journal: the core is a pure function of its configuration and events, so it must give the same commands
again."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from rackrun.coordinator.journal.command_causes import rule_column
from rackrun.coordinator.journal.journal_reader import as_of_today, open_journal
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.errors import UsageError
from rackrun.protocol.events import Event
from rackrun.protocol.job_config import JobConfig

__all__ = ["Replayed", "replay"]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    events: int = 0
    commands: int = 0
    difference: str = ""
    """The first difference between the journal and the replay; "" if there is none."""
    unknown: str = ""
    """Why the journal could not be compared; "" if it could."""


def replay(journal: Path) -> Replayed:
    """Feed the events of a journal to the core, and compare the commands.

    If the journal breaks off because its writer was killed, commands that follow from its last event may be missing.
    """
    try:
        with open_journal(journal) as (connection, meta):
            if int(meta.get("rows_lost", 0)):
                return Replayed(unknown=f"the journal lacks {meta['rows_lost']} rows")
            if "config" not in meta:
                return Replayed(unknown="the journal does not say how the job was configured")
            config = msgspec.json.decode(meta["config"], type=JobConfig)
            return _replay(connection, config, whole="ended_ms" in meta, ordered=meta["format"] != "3")
    except (UsageError, msgspec.MsgspecError, ValueError) as error:
        return Replayed(unknown=str(error))


def _replay(connection: sqlite3.Connection, config: JobConfig, *, whole: bool, ordered: bool) -> Replayed:
    """``ordered``: the commands of one event must have the same order. The core that wrote format 3 had another."""
    core, events, commands = ControlPlane(config), 0, 0
    expected: list[tuple[str, str]] = []
    """What the core has answered to the last event and is not compared yet, each with the rule that sent it."""
    heard = "the beginning"
    query = f"SELECT cause, kind, body, {rule_column(connection)} FROM events ORDER BY id"  # noqa: S608 - no input in it
    for cause, kind, stored, rule in connection.execute(query):
        body = as_of_today(stored)
        if kind == "command":
            if not cause:  # the launcher has ended the job without asking the core
                break
            same = (at for at, (one, _) in enumerate(expected) if one == body)
            at = 0 if ordered else next(same, 0)
            told, sent_by = expected.pop(at) if expected else ("nothing", "")
            commands += 1
            if told != body:
                return Replayed(
                    events=events,
                    commands=commands,
                    difference=f"after {heard}: {_short(body, rule)}; now: {_short(told, sent_by)}",
                )
            continue
        if expected:
            return Replayed(
                events=events, commands=commands, difference=f"after {heard}: nothing; now: {_short(*expected[0])}"
            )
        event = _event(body)
        events, heard = events + 1, f"{type(event).__name__} at {event.at_ms} ms"
        try:
            answer = core.handle(event)
            bodies = [msgspec.json.encode(command).decode() for command in answer]
            expected = [*zip(bodies, core.sent_by, strict=True)] if bodies else []
        except Exception as error:  # noqa: BLE001 - whatever it is: the core may not raise, and did then, or does now
            return Replayed(events=events, commands=commands, difference=f"{heard} is too much for it: {error!r}")
    if expected and whole:
        return Replayed(
            events=events, commands=commands, difference=f"after {heard}: nothing; now: {_short(*expected[0])}"
        )
    return Replayed(events=events, commands=commands)


def _event(body: str) -> Event:
    """Decode an event. JSON has no NaN, so a loss that was NaN is null in the journal."""
    try:
        event: Event = msgspec.json.decode(body, type=Event)
    except msgspec.ValidationError:
        event = msgspec.convert(_with_nan(msgspec.json.decode(body)), Event, builtin_types=(bytes,))
    return event


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(inner) for key, inner in value.items()}
    return [math.nan if inner is None else _with_nan(inner) for inner in value] if isinstance(value, list) else value


def _short(body: str, rule: str | None) -> str:
    short = body if len(body) <= 160 else f"{body[:160]}..."
    return f"{short} (sent by {rule})" if rule else short
