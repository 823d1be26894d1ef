"""``history.jsonl``: what happened in a run with faults, a line each, on one clock: seconds since the harness started the job.

The harness writes while it goes on, so that what it knew survives it. When the job has ended, `rackrun.chaos.report` adds what the
job's own journal tells of the strikes (``"by": "job"``), and puts all in order. ``type`` is as in Jepsen's histories: *invoke*, then *ok*
or *fail*, or *info* where neither can be said. ``cause`` is the ``id`` of another line: from the first step afterwards back to the strike.

::

    strike h7 -> confirmed (ok)
              -> noticed j41 (WorkerExited) -> decided j55 (swap) -> planned j56 -> resumed g2.resumed -> recovered g2.recovered
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from rackrun.errors import UsageError

__all__ = [
    "Begun",
    "Committed",
    "Confirmed",
    "Decided",
    "Ended",
    "Entry",
    "Recovered",
    "History",
    "Noticed",
    "Overtaken",
    "Placed",
    "Planned",
    "Resumed",
    "Started",
    "Strike",
    "TakenBack",
    "Told",
    "read_history",
    "schema",
    "write_history",
]

NAME = "history.jsonl"
Type = Literal["invoke", "ok", "fail", "info"]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", forbid_unknown_fields=True):
    at_s: float
    type: Type = "info"
    id: str
    cause: str | None = None
    by: Literal["harness", "job"] = "harness"


# -- the harness
class Started(_Entry, frozen=True, kw_only=True, tag="started"):
    pid: int
    """Of the launcher."""
    format: int = 1
    monotonic_s: float = 0.0
    """The host's monotonic clock when ``at_s`` was 0: the journal has the same clock."""
    wall_s: float = 0.0
    """Unix time then."""


class Placed(_Entry, frozen=True, kw_only=True, tag="placed"):
    """A slot, when somebody was first seen in it."""

    slot: str
    tray: str
    clique: str
    rack: str


class Committed(_Entry, frozen=True, kw_only=True, tag="committed"):
    """Seen by the harness, which looks every 20 ms: the journal knows better."""

    step: int


class Strike(_Entry, frozen=True, kw_only=True, tag="strike"):
    strike: int
    """Its number."""
    fault: dict[str, Any]
    """As in a plan."""
    whom: tuple[str, ...]
    slots: tuple[tuple[str, int], ...] = ()
    """Slot and incarnation of all who are struck."""


class Begun(_Entry, frozen=True, kw_only=True, tag="begun"):
    """The injector has done what it can do; whether it has taken effect, `Confirmed` says."""

    strike: int


class Confirmed(_Entry, frozen=True, kw_only=True, tag="confirmed"):
    strike: int
    took: bool | None
    detail: str
    struck_s: float | None = None
    """When it struck, which is a little after the order to (`Strike`); None: the injector cannot know."""


class TakenBack(_Entry, frozen=True, kw_only=True, tag="taken back"):
    strike: int


class Ended(_Entry, frozen=True, kw_only=True, tag="ended"):
    exit_code: int | None
    """None: it was killed, because it did not end."""
    left: tuple[str, ...]
    """Processes that outlived it."""


# -- the job, from its journal
class Noticed(_Entry, frozen=True, kw_only=True, tag="noticed"):
    """The first event of the core that a strike explains."""

    event: str
    """`rackrun.protocol.events`"""
    where: str
    """Slot or tray; "" of neither."""
    how: str
    inferred: bool = False
    """Tied to the strike by its time alone."""


class Decided(_Entry, frozen=True, kw_only=True, tag="decided"):
    generation: int
    rung: str
    reason: str


class Planned(_Entry, frozen=True, kw_only=True, tag="planned"):
    generation: int
    world_size: int
    committed: int
    """The last step that counts."""
    rollback: int | None
    members: dict[str, str]
    """Rank -> slot, of those who have joined in this generation."""


class Resumed(_Entry, frozen=True, kw_only=True, tag="resumed"):
    """Every rank computes again."""

    generation: int


class Recovered(_Entry, frozen=True, kw_only=True, tag="recovered"):
    """Every rank has committed a unit since: the recovery is over."""

    generation: int
    step: int


class Overtaken(_Entry, frozen=True, kw_only=True, tag="overtaken"):
    """Another failure came in the middle of the recovery."""

    generation: int


class Told(_Entry, frozen=True, kw_only=True, tag="told"):
    """A notice of the coordinator."""

    text: str


Entry = (
    Started
    | Placed
    | Committed
    | Strike
    | Begun
    | Confirmed
    | TakenBack
    | Ended
    | Noticed
    | Decided
    | Planned
    | Resumed
    | Recovered
    | Overtaken
    | Told
)
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Entry)


class History:
    """Written line by line, each there before anything else is done."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lines = file, 0
        self._strikes: dict[int, str] = {}
        self._open: dict[int, None] = {}
        """Strikes that nobody has confirmed, nor denied."""

    def tell(self, what: str, at_s: float, **more: object) -> None:
        """``more``: the fields of the entry that ``what`` names."""
        self._lines += 1
        number, name, type_ = more.get("strike"), f"h{self._lines}", "info"
        cause = self._strikes.get(number) if isinstance(number, int) else None
        if what == "strike" and isinstance(number, int):
            self._strikes[number], type_ = name, "invoke"
            self._open[number] = None
        elif what == "confirmed" and isinstance(number, int):
            type_ = "info" if more["took"] is None else "ok" if more["took"] else "fail"
            self._open.pop(number, None)
        entry = {"what": what, "at_s": round(at_s, 6), "type": type_, "id": name, "cause": cause, **more}
        self._file.write(msgspec.json.encode(msgspec.convert(entry, Entry)).decode() + "\n")
        self._file.flush()

    def give_up(self, at_s: float) -> None:
        """The job is over: of what is not confirmed nobody will ever know."""
        for number in list(self._open):
            self.tell("confirmed", at_s, strike=number, took=None, detail="nobody knows: the job ended first")


def read_history(path: Path) -> list[Entry]:
    """Raises `UsageError`. Of a harness that was killed, a last line may be torn: it is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", remedy="name the --out of a run.") from error
    found: list[Entry] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(_decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines):  # no line feed after it
                break
            raise UsageError(f"{path}:{number}: {error}.", remedy="was it written by another version?") from error
    return found


def write_history(path: Path, entries: Iterable[Entry]) -> None:
    """Whole, or the one before stays."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    partial.replace(path)


def schema() -> dict[str, Any]:
    """JSON Schema of a line."""
    return msgspec.json.schema(Entry)
