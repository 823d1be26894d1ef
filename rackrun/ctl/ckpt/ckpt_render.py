"""Output of ``rackctl ckpt``: tables for people, JSON for machines, progress bars on a terminal's error stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from rackrun.checkpoint.offline.directory_survey import DirectorySurvey
from rackrun.ctl.ckpt.former_number import numbered

__all__ = [
    "Checked",
    "DamageFound",
    "age",
    "amount",
    "print_json",
    "progress_bar",
    "render_checked",
    "render_surveys",
    "say",
    "surveyed",
]

_SHOWN_DAMAGE = 20
_SHOWN_NAMES = 3
_WHAT_IT_IS = {
    "unfinished": "being written, or left by a dead writer",
    "trash": "on its way out",
    "replaced": "the former checkpoint of this number; waste, once no job is at work here",
    "unnamed": "the checkpoint of this number, which is being replaced, or whose writer died. Remedy: if no job is at "
    "work here, rackctl ckpt gc or the next start of the job gives it its name back",
}


@dataclass(frozen=True)
class DamageFound:
    """``tensors``: those with bytes in the chunk; any of them may be hit."""

    what: str
    rank: int | None = None
    chunk: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    job: str
    number: int
    ok: bool
    bytes: int
    seconds: float
    damage: tuple[DamageFound, ...]


def print_json(what: object) -> None:
    """Print a value as JSON."""
    print(msgspec.json.encode(what).decode())


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line unchanged: not wrapped, and not interpreted as markup."""
    console.print(Text(text, style), soft_wrap=True, highlight=False)


def amount(size: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def age(seconds: float) -> str:
    """Return a time in its largest unit."""
    for name, unit in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with (bytes done, total bytes), which updates a bar on the terminal."""
    console = Console(stderr=True, markup=False, emoji=False)
    if quiet or not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def surveyed(found: DirectorySurvey, now_s: float) -> dict[str, Any]:
    """Return a survey as values for JSON. Ages are in seconds."""
    whole = [
        {
            **numbered(info.number),
            "step": info.step,
            "epoch": info.fencing_token,
            "world_size": info.world_size,
            "bytes": info.bytes,
            "digest": info.digest,
            "verified": info.verified,
            "barred": found.barred.get(info.number, ""),
            "age_s": _age_s(found, info.number, now_s),
            "path": str(info.path),
        }
        for info in found.whole
    ]
    damaged = [
        {**numbered(one.number), "what": one.what, "remedy": one.remedy, "path": str(one.path)} for one in found.damaged
    ]
    leftovers = [
        {
            "kind": one.kind,
            **numbered(one.number),
            "shards": one.shards,
            "world_size": one.world_size,
            "bytes": one.bytes,
            "age_s": max(now_s - one.touched_s, 0.0),
            "path": str(one.path),
        }
        for one in found.leftovers
    ]
    return {
        "job": found.job,
        "directory": str(found.directory),
        "checkpoints": whole,
        "generations": whole,
        "damaged": damaged,
        "leftovers": leftovers,
    }


def render_surveys(console: Console, directory: Path, found: Sequence[DirectorySurvey], now_s: float) -> None:
    if not found:
        say(console, f"there is no checkpoint in {directory}")
    for one in found:
        say(console, f"{one.job}  {one.directory}", "bold")
        if one.whole:
            _checkpoints(console, one, now_s)
        for info in one.whole:
            if why := one.barred.get(info.number):
                say(console, f"checkpoint {info.number} is {why}", "yellow")
        for damaged in one.damaged:
            say(console, f"{damaged.summary} Remedy: {damaged.remedy}", "red")
        for left in one.leftovers:
            of = f"{left.shards} of {left.world_size} shards" if left.world_size else "no shard yet"
            touched = f"touched {age(now_s - left.touched_s)} ago"
            say(
                console,
                f"{left.path.name}  {left.kind}: {of}, {amount(left.bytes)}, {touched}; {_WHAT_IT_IS[left.kind]}",
            )


def render_checked(console: Console, checked: Sequence[Checked]) -> None:
    if not checked:
        say(console, "all checkpoints are verified already")
    for one in checked:
        head = f"{one.job}  checkpoint {one.number}"
        if one.ok:
            say(console, f"{head}  ok: {amount(one.bytes)} in {one.seconds:.1f} s", "green")
            continue
        say(console, f"{head}  DAMAGED", "red")
        for damage in one.damage[:_SHOWN_DAMAGE]:
            say(console, f"  {damage.what}{_names(damage.tensors)}")
        if len(one.damage) > _SHOWN_DAMAGE:
            say(console, f"  and {len(one.damage) - _SHOWN_DAMAGE} more places")


def _checkpoints(console: Console, found: DirectorySurvey, now_s: float) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("number", "step", "ranks", "bytes", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for info in found.whole:
        seconds = _age_s(found, info.number, now_s)
        table.add_row(
            str(info.number),
            str(info.step),
            str(info.world_size),
            amount(info.bytes),
            "?" if seconds is None else age(seconds),
            ("verified" if info.verified else "not verified")
            + (f", {found.barred[info.number].partition(':')[0]}" if info.number in found.barred else ""),
        )
    console.print(table, highlight=False)


def _age_s(found: DirectorySurvey, number: int, now_s: float) -> float | None:
    written = found.written_s.get(number)
    return None if written is None else max(now_s - written, 0.0)


def _names(tensors: Sequence[str]) -> str:
    if not tensors:
        return ""
    more = f" and {len(tensors) - _SHOWN_NAMES} more" if len(tensors) > _SHOWN_NAMES else ""
    return f" There: {', '.join(tensors[:_SHOWN_NAMES])}{more}."
