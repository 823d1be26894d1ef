"""Set-up of a process that runs user code: its pipes to the parent, kept apart from what the code prints, and errors as
text."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import BinaryIO, NamedTuple

__all__ = ["ParentPipes", "find", "exit_in_forks", "error_text", "open_pipes"]

_PR_SET_PDEATHSIG = 1
_TOLD_MAX = 500
"""Number of characters of an error that are passed to the parent."""


class ParentPipes(NamedTuple):
    """Pipes from and to the parent. Standard input is empty from now on, and standard output goes to standard error."""

    down: BinaryIO
    up: BinaryIO


def open_pipes(up: int, *, outlives_parent: bool = False) -> ParentPipes:
    """Open the pipes, and make this process end with its parent. ``up`` is the descriptor that leads to the parent.

    ``outlives_parent``: it ends by itself, when it has read all that its parent has sent.
    """
    if not outlives_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(up, False)  # not inherited by programs that user code starts
    found = ParentPipes(os.fdopen(os.dup(0), "rb"), os.fdopen(up, "wb", buffering=0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed at any time
    return found


def find(name: str) -> object:
    """Import ``module:function``; dots lead into a class or an object. Raises whatever the import raises."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def exit_in_forks(pid: int) -> None:
    """End this process if it is a fork that user code has made, and not process ``pid``."""
    if os.getpid() != pid:
        os._exit(0)


def _user_code_ran(error: BaseException) -> bool:
    """Whether the traceback leads through other code than this room and the import system: not for a wrong name."""
    ours = (os.path.dirname(__file__), os.path.dirname(importlib.__file__), "<frozen")
    return any(not frame.f_code.co_filename.startswith(ours) for frame, _ in traceback.walk_tb(error.__traceback__))


def error_text(error: BaseException) -> str:
    """Return an error as text for the parent. If user code ran, the traceback goes to standard error."""
    with suppress(Exception):  # the error may not be printable
        if isinstance(error, SyntaxError) or _user_code_ran(error):
            traceback.print_exception(error)
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - its __str__ is user code too
        text = "which cannot be told"
    return f"{type(error).__name__}: {text}"[:_TOLD_MAX].encode("utf-8", "replace").decode()
