"""What a process in which user code runs needs: the way to its parent kept apart from what that code prints, and errors as words."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import BinaryIO, NamedTuple

__all__ = ["Wires", "find", "only", "told", "wires"]

_PR_SET_PDEATHSIG = 1
_TOLD_MAX = 500
"""Characters of an error that are passed on."""


class Wires(NamedTuple):
    """To and from the parent. Standard input is empty from now on, and standard output is standard error."""

    down: BinaryIO
    up: BinaryIO


def wires(up: int) -> Wires:
    """This process ends with its parent. ``up``: the descriptor that leads there."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_inheritable(up, False)  # by programs that user code starts
    found = Wires(os.fdopen(os.dup(0), "rb"), os.fdopen(up, "wb", buffering=0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed at any time
    return found


def find(name: str) -> object:
    """``module:function``; a dot leads into a class or an object. Raises whatever the import does."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def only(pid: int) -> None:
    """A copy that user code has made of this process, and that came back here, ends."""
    if os.getpid() != pid:
        os._exit(0)


def told(error: BaseException) -> str:
    """For the parent; the traceback goes to standard error."""
    with suppress(Exception):  # of an error that cannot be printed
        traceback.print_exception(error)
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - its __str__ is user code too
        text = "which cannot be told"
    return f"{type(error).__name__}: {text}"[:_TOLD_MAX].encode("utf-8", "replace").decode()
