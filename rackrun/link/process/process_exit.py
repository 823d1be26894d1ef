"""Exit of a process that has imported torch: like the interpreter's, but without freeing torch.

Python frees every module at its exit, which takes up to seconds for torch's. Objects frozen by `gc.freeze` are not
freed at all, and then libraries bound with nanobind, such as Triton, print pages of "leaked" functions and instances
after the last output. Python has no switch for that.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

__all__ = ["code_of", "end_process"]


def code_of(stop: SystemExit) -> int:
    """Return the exit code that Python would use for this SystemExit. A text is written to stderr."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def end_process(code: int) -> NoReturn:
    """Exit like the interpreter: wait for threads, run exit handlers, flush; but free nothing of torch."""
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
