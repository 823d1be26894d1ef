"""Why the core sent each command of a journal: the rule that sent it, and the event that it answers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple, get_args

import msgspec

from rackrun.coordinator.journal.journal_reader import as_of_today
from rackrun.protocol.events import TimerFired
from rackrun.protocol.timers import Timer

__all__ = ["CommandCause", "JournaledCommand", "SentTogether", "commands_of", "recovery_commands", "rule_column"]

_TIMERS = {kind.__struct_config__.tag: kind.__name__ for kind in get_args(Timer)}
_EXPIRY = TimerFired.__name__
_OF_GENERATION = ("BreakGeneration", "Decided", "StartWorker", "ResumeGeneration")
"""Commands that name the generation that they belong to."""
_ASIDE = ("SetTimer", "Notice", "Answer")
"""Commands that are not listed with a recovery: timers change nothing, and a report has a list of all notices."""


class CommandCause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a command was sent."""

    rule: str = ""
    """The rule of the core, by its name: a type of event, timer or fact, or a condition of
    `rackrun.core.machine.rules.RULES`. "": an older journal does not say it, or the coordinator ended the job without
    the core."""
    event: str = ""
    """Type of the event that the command answers."""
    of: str = ""
    """The slot or tray that the event concerns, or the type of the timer that has expired; "" if it is none of them."""
    event_id: int | None = None
    """The event's id in the journal."""

    def __str__(self) -> str:
        """Return the cause in words: ``by SwapDue, after DeviceJudged of tray-00 (event 41)``; "": it is not known."""
        if self.event_id is None:
            return ""
        expiry = self.event == _EXPIRY
        name = self.of if expiry else self.event
        what = f"{self.event} of {self.of}" if self.of and not expiry else name
        how = "after" if not self.rule else "by" if self.rule == name else f"by {self.rule}, after"
        return f"{how} {what} (event {self.event_id})"


class JournaledCommand(NamedTuple):
    """A command as the journal has it."""

    at_ms: int
    name: str
    body: str
    cause: CommandCause


class SentTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that one rule sent in answer to one event."""

    at_ms: int
    commands: dict[str, int]
    """How many there were of each type, in order."""
    cause: CommandCause

    def __str__(self) -> str:
        names = [name if count == 1 else f"{count} {name}" for name, count in self.commands.items()]
        return " ".join([", ".join(names), str(self.cause)]).strip()


class _Concerned(msgspec.Struct, frozen=True):
    """What an event concerns."""

    slot: str | None = None
    tray: str | None = None
    timer: dict[str, object] | None = None


class _Numbered(msgspec.Struct, frozen=True):
    """The generation of a command or of a plan."""

    generation: int = 0
    plan: _Numbered | None = None


_concerned = msgspec.json.Decoder(_Concerned)
_numbered = msgspec.json.Decoder(_Numbered)


def rule_column(connection: sqlite3.Connection) -> str:
    """Return the name of the column with the rules; ``NULL`` for a journal that is older than that column."""
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(events)")]
    return "rule" if "rule" in names else "NULL"


def commands_of(
    connection: sqlite3.Connection, *names: str, after: int = 0, until: int | None = None
) -> Iterator[JournaledCommand]:
    """Yield the commands of these types (none named: of all) with their causes, in order; ``after``, ``until``: of
    the ids between them, ``until`` included."""
    rule = rule_column(connection)
    which = f" AND name IN ({', '.join('?' * len(names))})" if names else ""
    rows = connection.execute(
        f"SELECT at_ms, name, body, cause, {rule} FROM events WHERE kind = 'command' AND id > ? AND id <= ?{which} ORDER BY id",  # noqa: S608 - no input in it
        (after, 2**62 if until is None else until, *names),
    )
    known: dict[int, CommandCause] = {}
    for at_ms, name, body, number, sender in rows:
        if number and number not in known:
            known = {number: _event_of(connection, number)}
        event = known[number] if number else CommandCause()
        yield JournaledCommand(at_ms, name, body, msgspec.structs.replace(event, rule=sender or ""))


def recovery_commands(connection: sqlite3.Connection) -> dict[int, tuple[SentTogether, ...]]:
    """Return for each generation the commands that led to it, from the first event that began it to its plan, with
    those of other generations and notices left out."""
    begins, plans = dict[int, int](), dict[int, int]()
    query = (
        f"SELECT id, cause, name, body FROM events WHERE name IN ({', '.join('?' * len(_OF_GENERATION))}) AND cause > 0"  # noqa: S608 - marks only
    )
    for number, cause, name, body in connection.execute(f"{query} ORDER BY id", _OF_GENERATION):
        told = _numbered.decode(body)
        generation = told.plan.generation if told.plan is not None else told.generation
        begins.setdefault(generation, cause)
        if name == "ResumeGeneration":
            plans[generation] = number
    found = dict[int, tuple[SentTogether, ...]]()
    order = sorted(begins, key=lambda generation: (begins[generation], generation))
    for generation, later in zip(order, [*order, None][1:], strict=True):
        until = plans.get(generation, None if later is None else begins[later])
        found[generation] = _together(commands_of(connection, after=begins[generation], until=until))
    return found


def _event_of(connection: sqlite3.Connection, number: int) -> CommandCause:
    """Return the event with this id as a cause."""
    row = connection.execute("SELECT name, body FROM events WHERE id = ?", (number,)).fetchone()
    if row is None:
        return CommandCause()
    name, body = row
    try:
        concerned = _concerned.decode(as_of_today(body))
    except ValueError:  # written by a version that has other events: the cause is known all the same
        concerned = _Concerned()
    timer = _TIMERS.get(str(concerned.timer.get("timer")), "") if concerned.timer else ""
    return CommandCause(event=name, of=timer or concerned.slot or concerned.tray or "", event_id=number)


def _together(commands: Iterator[JournaledCommand]) -> tuple[SentTogether, ...]:
    found: list[SentTogether] = []
    for one in commands:
        if one.name in _ASIDE:
            continue
        if not found or found[-1].cause != one.cause:
            found.append(SentTogether(at_ms=one.at_ms, commands={}, cause=one.cause))
        found[-1].commands[one.name] = found[-1].commands.get(one.name, 0) + 1
    return tuple(found)
