"""What a check is, and the list of all checks. Imports nothing heavy: the runner needs the list, the check's own process needs torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "FIRST",
    "MODES",
    "MODULES",
    "Check",
    "Context",
    "Found",
    "Mode",
    "Skip",
    "check",
    "failed",
    "load",
    "select",
]

Mode = Literal["one", "box", "dry"]
MODES: tuple[Mode, ...] = ("one", "box", "dry")

MODULES = ("env", "primitives", "nccl", "relied_on", "shared", "overhead", "processes", "box")
"""Of this package, with checks in them: A, B, C, C from C8 on, D, E, F and G, H."""

_OF_MODE: dict[Mode, str] = {"one": "ABCDEFG", "box": "AH", "dry": "ABCDEFG"}

FIRST = (
    *("A1", "A2", "D0", "D7", "D1", "B4", "B8", "B1", "B9", "C1", "C8", "C9", "C10", "C11", "C12", "C14"),
    *("C13", "A3", "A4", "A6", "D8", "D9", "D11", "D13", "E9", "F6", "F8", "D6", "E10"),
    *("B2", "B5", "B7", "B12", "C4", "C2", "C3", "C5", "C6", "D2", "D3", "D12", "D5", "D4"),
    *("E1", "E2", "E7", "E3", "E4", "E5", "D10", "F2", "F7", "C7"),
    *("A5", "B10", "B11", "F5", "F4", "F1", "B3", "B6"),
    *("H5", "H2", "H1", "H3", "H6", "H9", "H7", "H12", "H4"),
)
"""What a run begins with, the most important first: does it work here at all, are the bits right, does the runtime rest on what it believes, is
anybody left hanging, what does it cost. The others follow in their own order; G, which leaves an Xid in the log, is last."""


class Skip(Exception):
    """The check cannot run here; the text says why."""


@dataclass(frozen=True)
class Found:
    """What a check has found. ``ok`` is its judgement; a figure that nothing is asked of is ok."""

    value: float | str | None = None
    unit: str = ""
    note: str = ""
    ok: bool = True


def failed(note: str, value: float | str | None = None, unit: str = "") -> Found:
    return Found(value, unit, note, ok=False)


@dataclass
class Context:
    """What a check is given. ``folder`` is its own and goes with it; ``shared`` stays for the checks after it."""

    mode: Mode
    folder: Path
    shared: Path
    limit_s: float
    deadline: float = 0.0
    """Of time.monotonic(): the check is killed then."""
    notes: list[str] = field(default_factory=list)

    @property
    def dry(self) -> bool:
        return self.mode == "dry"

    @property
    def device(self) -> Any:
        """torch's: the GPU, or the host in a dry run."""
        import torch

        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def pick(self, real: Any, dry: Any) -> Any:
        """Sizes and counts: a dry run only goes the same way."""
        return dry if self.dry else real

    def within(self, name: str) -> Context:
        """The same, with a folder in this one's for a part of the check."""
        folder = self.folder / name
        folder.mkdir()
        return replace(self, folder=folder, notes=[])

    def note(self, text: str) -> None:
        """Added to what the check says at its end, however it ends by itself."""
        self.notes.append(text)


@dataclass(frozen=True)
class Check:
    id: str
    title: str
    expected: str
    limit_s: float
    must: bool
    """The exit code depends on it; else it is a figure, which may still be told to be worse than expected."""
    not_dry: str
    """Why a dry run leaves it out. "": it does not."""
    beside: bool
    """It judges no time, so that others of this kind may run at the same time."""
    run: Callable[[Context], Found]
    module: str

    @property
    def section(self) -> str:
        return self.id[0]

    def why_not(self, mode: Mode, *, xid: bool) -> str:
        """Why it does not run in ``mode``; "" where it does."""
        if self.section == "G" and not xid:
            return "leaves an Xid in the kernel's log: ask for it with --xid"
        return self.not_dry if mode == "dry" else ""


_CHECKS: dict[tuple[str, str], Check] = {}


def check(
    id: str,  # noqa: A002 - the word of the tables
    title: str,
    *,
    expected: str,
    limit_s: float,
    must: bool = True,
    not_dry: str = "",
    beside: bool = False,
) -> Callable[[Callable[[Context], Found]], Callable[[Context], Found]]:
    """Register a function as a check. ``limit_s``: its process is killed then."""

    def register(run: Callable[[Context], Found]) -> Callable[[Context], Found]:
        if (run.__module__, id) in _CHECKS:
            raise ValueError(f"two checks are called {id}")
        _CHECKS[run.__module__, id] = Check(id, title, expected, limit_s, must, not_dry, beside, run, run.__module__)
        return run

    return register


def load(modules: Iterable[str] = ()) -> list[Check]:
    """All checks of ``modules``, by default the kit's own, in order: A1, A2, ... H11."""
    names = list(modules) or [f"benchmarks.gpu.{name}" for name in MODULES]
    for name in names:
        importlib.import_module(name)
    return sorted((one for one in _CHECKS.values() if one.module in names), key=_order)


def select(checks: Iterable[Check], mode: Mode, only: str) -> list[Check]:
    """Those of ``mode``, or of ``only`` (letters of sections and ids, with commas between), the most important first. Raises ValueError for what
    there is not."""
    checks = sorted(checks, key=_importance)  # of equal importance: as they are
    if not only:
        return [one for one in checks if one.section in _OF_MODE[mode]]
    wanted = [word.strip().upper() for word in only.split(",") if word.strip()]
    known = {one.id for one in checks} | {one.section for one in checks}
    if unknown := [word for word in wanted if word not in known]:
        raise ValueError(f"there is no check {', '.join(unknown)}; there are {', '.join(one.id for one in checks)}")
    return [one for one in checks if one.id in wanted or one.section in wanted]


def _importance(one: Check) -> tuple[bool, int]:
    return one.section == "G", FIRST.index(one.id) if one.id in FIRST else len(FIRST)


def _order(one: Check) -> tuple[str, int]:
    number = re.sub(r"\D", "", one.id[1:])
    return one.section, int(number or 0)
