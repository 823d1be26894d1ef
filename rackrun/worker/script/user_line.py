"""Finds the line of the user's script from which something was called, for errors and notices."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from pathlib import Path

import torch

__all__ = [
    "generators",
    "in_generator",
    "keeps_something",
    "line_at",
    "line_of_name",
    "user_frame",
    "user_line",
    "user_place",
]

_OURS = (str(Path(__file__).resolve().parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<")
_ATTEMPTS = str(Path(__file__).resolve().parents[1] / "loop" / "unit_runner.py")
"""The module that attempts units. It catches what leaves an attempt."""
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LIBRARIES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def user_line(frame: types.FrameType | None = None) -> str:
    """Return text like ``train.py:31``: the innermost line in the current calls that belongs to no library, or else to
    neither rackrun nor torch; "" if there is none."""
    return line_at(user_place(frame or sys._getframe(1)))


def user_place(frame: types.FrameType | None = None) -> tuple[str, int] | None:
    """Return file and line for `line_at`, which costs more and is rarely needed; None if there is none."""
    at = user_frame(frame or sys._getframe(1))
    return (at.f_code.co_filename, at.f_lineno) if at is not None else None


def line_at(place: tuple[str, int] | None) -> str:
    """Return what `user_line` returned at ``place``, a result of `user_place`."""
    return _told(*place) if place is not None else ""


def user_frame(frame: types.FrameType | None = None) -> types.FrameType | None:
    """Return the frame whose line `user_line` names, or None."""
    at = frame or sys._getframe(1)
    of_library = None
    while at is not None:
        name = at.f_code.co_filename
        if not name.startswith(_OURS):
            if not name.startswith(_LIBRARIES):
                return at
            of_library = of_library or at
        at = at.f_back  # type: ignore[assignment]
    return of_library


def generators() -> list[types.FrameType]:
    """Return the frames of generators of the script, or of a library, among the current calls: those within the unit
    that is attempted, not around its attempt."""
    found, at = list[types.FrameType](), sys._getframe(1)
    while at is not None and at.f_code.co_filename != _ATTEMPTS:
        if at.f_code.co_flags & _GENERATORS and not at.f_code.co_filename.startswith(_OURS):
            found.append(at)
        at = at.f_back  # type: ignore[assignment]
    return found


def in_generator() -> bool:
    """Return whether `generators` finds any."""
    return bool(generators())


def keeps_something(line: str) -> bool:
    """Return whether the place ``line`` (``train.py:31``, from `user_line`) lies in an assignment, or in the condition
    of an ``if`` whose body assigns something. False where there is no source."""
    import ast

    from rackrun.worker.script.syntax_tree import syntax_tree

    name, _, number = line.rpartition(":")
    if not number.isdigit():
        return False
    tree = syntax_tree(name)
    if tree is None:
        return False
    at = int(number)
    names = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.withitem)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= at <= (node.end_lineno or at):
            return True
        if isinstance(node, ast.If) and node.test.lineno <= at <= (node.test.end_lineno or at):
            return any(isinstance(inner, names) for one in node.body for inner in ast.walk(one))
    return False


def line_of_name(function: object, name: str) -> str:
    """Return the line where ``function`` first uses the variable ``name`` (local, of its closure or of its module), or
    else where the function begins."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return _told(code.co_filename, _line_of_name(code, name) or code.co_firstlineno)


def _line_of_name(code: types.CodeType, name: str) -> int | None:
    import dis

    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.positions is not None and "COPY_FREE" not in instruction.opname:
            return instruction.positions.lineno
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and (found := _line_of_name(constant, name)):
            return found
    return None


def _told(name: str, line: int) -> str:
    here = os.getcwd() + os.sep
    return f"{name.removeprefix(here)}:{line}"
