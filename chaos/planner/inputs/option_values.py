"""Parse values on a command line: durations (``8000h``), lists of numbers (``0,4,8``), factors (``0.02:10``)."""

from __future__ import annotations

import math
import re

from rackrun.chaos.base.errors import PlannerError

__all__ = ["duration", "numbers", "pair", "sizes", "spell", "volume"]

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str, what: str) -> float:
    """Return the seconds of a text such as ``90s``, ``4h``, ``30d``.

    ``what`` names the option. Raises PlannerError unless the duration is above 0.
    """
    found = _seconds(text)
    if found is None or not 0 < found < math.inf:
        raise PlannerError(f"{what} {text!r} is no duration above 0.", remedy="write a number and s, m, h or d: 8000h.")
    return found


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers of a text such as ``0,4,8``, sorted and each once. Raises PlannerError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise PlannerError(f"{what} {text!r} is no list of numbers from 0.", remedy="write them like 0,4,8.")
    return tuple(sorted(dict.fromkeys(int(word) for word in words)))


def pair(text: str, what: str, remedy: str) -> tuple[str, str]:
    """Return the two sides of a colon. Raises PlannerError, with ``remedy``, unless there are two."""
    left, colon, right = text.partition(":")
    if not colon or not left or not right:
        raise PlannerError(f"{what} {text!r} needs two parts and a colon.", remedy=remedy)
    return left, right


def volume(text: str, what: str) -> float:
    """Return the bytes of a text such as ``12.7GB``, ``512MiB``, ``4000000``. Raises PlannerError for any other
    text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|[kKMGT]i?B)?", text.strip())
    if found is None:
        raise PlannerError(
            f"{what} {text!r} is no number of bytes.", remedy="write a number and MB, GB or GiB: 12.7GB."
        )
    unit = found[2] or "B"
    power = "BKMGT".index(unit[0].upper())
    return float(found[1]) * (1024.0 if "i" in unit else 1000.0) ** power


def sizes(text: str, what: str) -> dict[str, int]:
    """Return the names and sizes of a text such as ``tp:8,dp:128``, each name once. Raises PlannerError."""
    remedy = "write names and numbers: tp:8,dp:128."
    found: dict[str, int] = {}
    for word in filter(None, (one.strip() for one in text.split(","))):
        name, number = pair(word, what, remedy)
        if not number.strip().isdecimal() or name in found:
            raise PlannerError(f"{word!r} in {what} {text!r} is not a size, or its name occurs twice.", remedy=remedy)
        found[name] = int(number)
    return found


def spell(seconds: float) -> str:
    """Return seconds as a text for people: ``2.5 min``."""
    for name, unit in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * unit or (name == "s" and seconds >= 1):
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e3:.3g} ms"


def _seconds(text: str) -> float | None:
    word = text.strip().lower()
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = _UNITS.get(word[len(number) :])
    try:
        return None if unit is None else float(number) * unit
    except ValueError:
        return None
