"""Read and write ``history.jsonl``: the entries of a run with faults, one a line, in seconds since the job's start.

The harness writes each entry at once, so that its knowledge survives it. When the job has ended, `rackrun.chaos.report`
adds what the job's own journal says about the strikes (``"by": "job"``), and sorts all entries. ``type`` is as in
Jepsen's histories: *invoke*, then *ok* or *fail*, or *info* where neither can be said. ``cause`` is the ``id`` of
another entry; these links lead from the first step after a recovery back to the strike.

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
    "InjectorDone",
    "Committed",
    "StrikeConfirmed",
    "RungChosen",
    "Ended",
    "Entry",
    "HistoryWriter",
    "Noticed",
    "RecoveryInterrupted",
    "Placed",
    "Planned",
    "Recovered",
    "Resumed",
    "Started",
    "Strike",
    "TakenBack",
    "JobNotice",
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
    """The harness has started the job."""

    pid: int
    """The launcher's process id."""
    format: int = 2
    """1: the lines of the job do not say by which rule the core sent a command."""
    monotonic_s: float = 0.0
    """The host's monotonic clock when ``at_s`` was 0; the journal uses the same clock."""
    wall_s: float = 0.0
    """Unix time when ``at_s`` was 0."""


class Placed(_Entry, frozen=True, kw_only=True, tag="placed"):
    """A worker was seen in this slot for the first time."""

    slot: str
    tray: str
    clique: str
    rack: str


class Committed(_Entry, frozen=True, kw_only=True, tag="committed"):
    """The harness has seen that a step is committed. It looks every 20 ms; the journal is more precise."""

    step: int


class Strike(_Entry, frozen=True, kw_only=True, tag="strike"):
    """The harness has ordered a strike."""

    strike: int
    """The number of the strike in the run."""
    fault: dict[str, Any]
    """The fault, as in a plan."""
    whom: tuple[str, ...]
    slots: tuple[tuple[str, int], ...] = ()
    """Slot and incarnation of every worker that is struck."""


class InjectorDone(_Entry, frozen=True, kw_only=True, tag="begun"):
    """The injector has done its part; `StrikeConfirmed` says whether the strike has taken effect."""

    strike: int


class StrikeConfirmed(_Entry, frozen=True, kw_only=True, tag="confirmed"):
    """Whether a strike has taken effect; ``took`` is None if nobody will ever know."""

    strike: int
    took: bool | None
    detail: str
    struck_s: float | None = None
    """When it struck, a little after the order to strike (`Strike`); None if the injector cannot know."""


class TakenBack(_Entry, frozen=True, kw_only=True, tag="taken back"):
    """A fault that lasts has been taken back."""

    strike: int


class Ended(_Entry, frozen=True, kw_only=True, tag="ended"):
    """The job has ended."""

    exit_code: int | None
    """The launcher's exit code; None if the job did not end and was killed."""
    left: tuple[str, ...]
    """Processes that outlived the job."""


# -- the job, from its journal
class Noticed(_Entry, frozen=True, kw_only=True, tag="noticed"):
    """The first event of the core that a strike explains."""

    event: str
    """The event's name in `rackrun.protocol.events`."""
    where: str
    """The slot or tray that the event concerns; "" if it concerns neither."""
    how: str
    inferred: bool = False
    """Whether the event is linked to the strike by its time alone."""


class RungChosen(_Entry, frozen=True, kw_only=True, tag="decided"):
    """The core has chosen a rung."""

    generation: int
    rung: str
    reason: str
    rule: str = ""
    """The rule of the core that sent the command, by its name; "": the journal does not say it."""


class Planned(_Entry, frozen=True, kw_only=True, tag="planned"):
    """The core has planned a new generation."""

    generation: int
    world_size: int
    committed: int
    """The last step that counts."""
    rollback: int | None
    members: dict[str, str]
    """Rank -> slot, for the members that joined in this generation."""
    rule: str = ""
    """The rule of the core that sent the plan; "": the journal does not say it."""


class Resumed(_Entry, frozen=True, kw_only=True, tag="resumed"):
    """Every rank computes again."""

    generation: int


class Recovered(_Entry, frozen=True, kw_only=True, tag="recovered"):
    """Every rank has committed a unit since it resumed, so the recovery is over."""

    generation: int
    step: int


class RecoveryInterrupted(_Entry, frozen=True, kw_only=True, tag="overtaken"):
    """Another failure came in the middle of the recovery."""

    generation: int


class JobNotice(_Entry, frozen=True, kw_only=True, tag="told"):
    """The coordinator has issued a notice."""

    text: str
    rule: str = ""
    """The rule of the core that sent it; "": the journal does not say it."""


Entry = (
    Started
    | Placed
    | Committed
    | Strike
    | InjectorDone
    | StrikeConfirmed
    | TakenBack
    | Ended
    | Noticed
    | RungChosen
    | Planned
    | Resumed
    | Recovered
    | RecoveryInterrupted
    | JobNotice
)
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Entry)


class HistoryWriter:
    """Write a history line by line; each line is flushed at once."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lines = file, 0
        self._strikes: dict[int, str] = {}
        self._open: dict[int, None] = {}
        """Strikes that are neither confirmed nor denied yet."""

    def tell(self, what: str, at_s: float, **more: object) -> None:
        """Write the entry named ``what``. ``more`` holds its other fields."""
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
        """Record for every strike without an outcome that none will ever be known, because the job is over."""
        for number in list(self._open):
            self.tell("confirmed", at_s, strike=number, took=None, detail="nobody knows: the job ended first")


def read_history(path: Path) -> list[Entry]:
    """Read a history. Raises `UsageError`.

    A last line that is incomplete because the harness was killed is left out.
    """
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
            if number == len(lines):  # the last line, incomplete: no line feed follows it
                break
            raise UsageError(f"{path}:{number}: {error}.", remedy="was it written by another version?") from error
    return found


def write_history(path: Path, entries: Iterable[Entry]) -> None:
    """Write a history. The file at ``path`` is replaced as a whole, or stays as it was."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    partial.replace(path)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a line."""
    return msgspec.json.schema(Entry)
