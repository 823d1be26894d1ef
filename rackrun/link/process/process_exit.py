"""How a process that has imported torch ends: as an interpreter does, but for taking torch apart.

Python frees every module at its end, which takes up to seconds for torch's. What `gc.freeze` was called on is not freed at all, and then libraries that are bound
with nanobind, such as Triton, print pages of "leaked" functions and instances behind whatever was the last word. There is no switch for that in Python.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

__all__ = ["code_of", "end_process"]


def code_of(stop: SystemExit) -> int:
    """The exit code that Python gives a process for it. A text is written to stderr."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def end_process(code: int) -> NoReturn:
    """Leave as an interpreter does: wait for threads, run exit handlers, flush; but tear nothing of torch down."""
    steps = (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
    for step in steps:
        try:
            step()
        except SystemExit as stop:
            code = code_of(stop)
        except BaseException as error:  # noqa: BLE001 - as the interpreter: say so, go on
            sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # what Python itself exits with when it cannot flush
    os._exit(code)
