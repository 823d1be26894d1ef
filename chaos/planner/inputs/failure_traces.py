"""Replay recorded failures from a CSV file of ``hours,where,kind,repair_hours``.

``where`` is ``RACK`` or ``RACK/TRAY``, each counted from 0. ``kind`` is ``hardware`` (repaired for ``repair_hours``,
and unusable until then), ``process`` (its workers die, the hardware is in order), or ``stall`` (nothing dies, the step
is done again). Lines may be in any order; empty lines and those that begin with ``#`` are ignored.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.inputs.failures import UnitFailure
from rackrun.chaos.planner.inputs.fleet import Fleet

__all__ = ["HEADER", "FailureTrace", "read_trace"]

HEADER = ("hours", "where", "kind", "repair_hours")
_REMEDY = "write hours,where,kind,repair_hours: 12.5,3/17,hardware,6 is tray 17 of rack 3; kinds are hardware, process, stall."


class FailureTrace:
    """The recorded failures. A `rackrun.chaos.planner.inputs.failures.FailureSource`."""

    def __init__(self, strikes: Iterable[tuple[float, UnitFailure]], horizon_s: float) -> None:
        self._strikes = [(at_s, strike) for at_s, strike in strikes if at_s < horizon_s]

    def begin(self) -> list[tuple[float, UnitFailure]]:
        return list(self._strikes)

    def again(self, strike: UnitFailure, since_s: float) -> tuple[float, UnitFailure] | None:  # noqa: ARG002
        return None


def read_trace(path: Path, fleet: Fleet) -> list[tuple[float, UnitFailure]]:
    """Return the failures with their times in seconds, in order. Raises PlannerError, which names the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PlannerError(f"{path} cannot be read: {why}.", remedy=_REMEDY) from error
    found = []
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        words = [word.strip() for word in row]
        if not any(words) or words[0].startswith("#") or tuple(words) == HEADER:
            continue
        try:
            found.append(_strike(words, fleet))
        except ValueError as error:
            raise PlannerError(f"{path}, line {number}: {error}.", remedy=_REMEDY) from error
    if not found:
        raise PlannerError(f"{path} lists no failure.", remedy=_REMEDY)
    return sorted(found)


def _strike(words: list[str], fleet: Fleet) -> tuple[float, UnitFailure]:
    if len(words) != len(HEADER):
        raise ValueError(f"the line has {len(words)} fields instead of {len(HEADER)}")
    hours, where, kind, repair = words
    at_s = 3600 * _number(hours, "hours")
    if kind not in ("hardware", "process", "stall"):
        raise ValueError(f"a failure cannot be of kind {kind!r}")
    repair_s = 3600 * _number(repair or "0", "repair_hours")
    if (kind == "hardware") != (repair_s > 0):
        raise ValueError(f"a failure of kind {kind!r} cannot take a repair of {repair or '0'} h")
    rack, slash, tray = where.partition("/")
    number = _whole(rack, fleet.racks, "rack")
    if not slash:
        return at_s, UnitFailure(0, "rack", number, repair_s, kind == "stall")
    unit = number * fleet.trays + _whole(tray, fleet.trays, "tray")
    return at_s, UnitFailure(0, "tray", unit, repair_s, kind == "stall")


def _number(text: str, what: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise ValueError(f"{what} {text!r} is not a number of 0 or more")
    return found


def _whole(text: str, count: int, what: str) -> int:
    if not text.isdecimal() or int(text) >= count:
        raise ValueError(f"there is no {what} {text!r} among {count}")
    return int(text)
