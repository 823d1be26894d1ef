"""Conversion of arbitrary values to values that every message and journal format can encode.

Text may hold lone surrogates (in file names, and in what ``surrogateescape`` reads), numbers may have more than 64
bits, and objects may be of types that no format knows. None of these may end a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["INT_MAX", "bounded", "clean", "encodable", "json_of", "number_or_text"]

INT_MAX = 2**63 - 1
"""The largest integer that SQLite and every reader of a message can hold."""
_DEPTH_MAX = 100


def clean(text: str) -> str:
    """Return ``text`` with an escape in place of each lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return str(text)  # also of a subclass


def bounded(text: str, length: int) -> str:
    """Return at most about ``length`` characters of ``text``, cleaned: the first quarter from its beginning, the rest
    from its end."""
    if len(text) > length:
        head, tail = length // 4, length - length // 4
        text = f"{text[:head]}\n... {len(text) - length} characters left out ...\n{text[-tail:]}"
    return clean(text)


def encodable(value: Any, depth: int = 0) -> Any:
    """Return ``value`` as builtin values that every format can encode: structs with their tags, 64-bit numbers, clean
    text."""
    if depth > _DEPTH_MAX:
        return "..."
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=lambda other: encodable(other, depth + 1))
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int):
        return max(-INT_MAX, min(int(value), INT_MAX))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {encodable(key, depth + 1): encodable(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encodable(one, depth + 1) for one in value]
    return number_or_text(value, 1000)


def json_of(body: object) -> bytes:
    """Return ``body`` as JSON. Parts that JSON cannot hold are converted by `encodable`, so this never fails on
    them."""
    try:
        return msgspec.json.encode(body)
    except (ValueError, OverflowError, TypeError):
        return msgspec.json.encode(encodable(body))


def number_or_text(value: object, length: int) -> float | int | str:
    """Return an object as a number if 64 bits can hold it, else as at most ``length`` characters. Never raises."""
    try:
        if isinstance(value, str):
            return bounded(value, length)
        if isinstance(value, float):
            return float(value)
        if hasattr(value, "__index__"):
            try:
                whole = value.__index__()
                return int(whole) if -INT_MAX <= whole <= INT_MAX else float(whole)
            except (TypeError, ValueError, RuntimeError):
                pass  # an array of several numbers has it too
        if hasattr(value, "__float__"):
            try:
                return float(value)
            except (TypeError, ValueError, RuntimeError):
                pass
        return bounded(str(value), length)
    except Exception:  # noqa: BLE001 - an object may do anything when it is asked what it is
        return f"<{clean(type(value).__name__)}>"
