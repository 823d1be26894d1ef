"""The names that users may rely on, and their signatures, as text.

python -m tests.typing.public_api      # writes public_api.txt anew
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NewType

import msgspec

__all__ = ["FILE", "described"]

FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "rackrun",
    "rackrun.accelerate",
    "rackrun.lightning",
    "rackrun.policy",
    "rackrun.provider",
    "rackrun.checkpoint",
    "rackrun.checkpoint.dcp",
    "rackrun.chaos",
)
_MADE_BY_US = ("rackrun.Run", "rackrun.Step", "rackrun.checkpoint.SaveHandle")
"""Users are given these; how they are made is nobody's business."""


def described() -> str:
    """One line for each public name, in the order of the names."""
    lines: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        lines += [
            line for public in sorted(module.__all__) for line in _lines(f"{name}.{public}", getattr(module, public))
        ]
    return "\n".join(lines) + "\n"


def _lines(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, NewType):
        yield f"{name}: a new type of {getattr(thing.__supertype__, '__qualname__', thing.__supertype__)}"
        return
    if not inspect.isclass(thing):
        yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type(thing).__qualname__}"
        return
    bases = ", ".join(base.__qualname__ for base in thing.__bases__ if base not in (object, msgspec.Struct))
    yield f"class {name}{'' if _not_made_by_users(name, thing) else _signature(thing)}{f' is a {bases}' if bases else ''}"
    if issubclass(thing, Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in thing)
        return
    members: dict[str, str] = {}
    for owner in reversed(thing.__mro__):
        if owner.__module__.partition(".")[0] == "rackrun":
            members |= dict.fromkeys(_set_when_made(owner), ": attribute")
            members |= {key: text for key, value in vars(owner).items() if (text := _member(value))}
    if dataclasses.is_dataclass(thing) or issubclass(thing, msgspec.Struct):
        for field in inspect.signature(thing).parameters:  # which the signature shows
            members.pop(field, None)
    yield from (f"{name}.{key}{text}" for key, text in sorted(members.items()) if not key.startswith("_"))


def _not_made_by_users(name: str, thing: type) -> bool:
    return name in _MADE_BY_US or issubclass(thing, Enum) or getattr(thing, "_is_protocol", False)


def _member(value: object) -> str:
    """What stands behind its name; nothing for what is none of the class's own."""
    if isinstance(value, property):
        return f" -> {_signature(value.fget).rpartition(' -> ')[2]} (property)"
    if isinstance(value, staticmethod | classmethod):
        return f"{_signature(value.__func__)} ({type(value).__name__})"
    return _signature(value) if inspect.isfunction(value) else ""


def _set_when_made(owner: type) -> Iterator[str]:
    """Attributes that ``__init__`` gives to ``self``."""
    made = vars(owner).get("__init__")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(made))) if inspect.isfunction(made) else ast.Module([], [])
    except OSError:  # written by a decorator
        return
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr
            case _:
                pass


def _signature(thing: Any) -> str:
    """As `inspect.signature` has it, without addresses, and without the modules that classes are in."""
    if inspect.isclass(thing) and issubclass(thing, Exception) and not inspect.isfunction(thing.__init__):
        return "(...)"  # as any exception: Python's versions do not agree on how to write that
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


if __name__ == "__main__":
    FILE.write_text(described(), encoding="utf-8")
