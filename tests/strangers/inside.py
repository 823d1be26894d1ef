"""In every worker of a run (``--preload``): counts the lines of the user's script that a rank comes to, and strikes at one of them.

The script knows nothing of it. A place is (rank, unit, line, visit): the ``visit``-th time that ``rank`` comes to ``line`` in ``unit``, which is the
number of the step in hand, BEFORE the loop, or AFTER it. Lines are seen by ``sys.settrace``, in the main thread and in this script's frames only.
What is to be done stands in the file that STRANGERS_ORDERS names. Each fault strikes once in a run: whoever makes its file strikes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

BEFORE, AFTER = -1, 1_000_000


class Tracer:
    def __init__(self, orders: dict[str, Any]) -> None:
        self._script: str = orders["script"]
        self._main: str = orders["main"]
        self._loop: str = orders["loop_variable"]
        self._loop_ends: int = orders["loop_ends"]
        self._steps: dict[str, str] = orders["step_functions"]
        """Name of a step function -> name of its argument."""
        self._faults: list[dict[str, Any]] = orders["faults"]
        self._out = Path(orders["out"])
        self._profile: bool = orders["profile"]
        self._pid = 0
        self._unit = BEFORE
        self._visits: dict[int, int] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename != self._script:
            return None
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            self._pid = os.getpid()
        if self._pid != os.getpid():  # a loader's worker, forked from this one
            return None
        if code.co_name in self._steps:
            self._enter(int(frame.f_locals[self._steps[code.co_name]]))
        self._line(frame)
        return self._within

    def _within(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            if frame.f_code.co_name == self._main:
                if frame.f_lineno > self._loop_ends:
                    self._enter(AFTER)
                elif self._loop in frame.f_locals:
                    self._enter(int(frame.f_locals[self._loop]))
            self._line(frame)
        elif event == "return" and frame.f_code.co_name == "<module>":
            self._flush()
        return self._within

    def _enter(self, unit: int) -> None:
        if unit != self._unit:
            self._flush()
            self._unit, self._visits = unit, {}

    def _line(self, frame: FrameType) -> None:
        line = frame.f_lineno
        visit = self._visits[line] = self._visits.get(line, 0) + 1
        for fault in self._faults:
            if (
                fault["unit"] == self._unit
                and fault["line"] == line
                and fault["visit"] <= visit
                and fault["rank"] == rank()
            ):
                self._strike(fault)
        if self._unit == AFTER:
            self._flush()

    def _flush(self) -> None:
        if self._profile and self._visits:
            row = {"rank": rank(), "unit": self._unit, "visits": self._visits}
            with open(self._out / "profile.jsonl", "ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")

    def _strike(self, fault: dict[str, Any]) -> None:
        try:
            os.close(os.open(self._out / f"claimed-{fault['id']}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        note = self._out / f"note-{fault['id']}"
        note.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}))
        note.rename(self._out / f"struck-{fault['id']}")
        act = ACTS[fault["what"]]
        if fault["delay_s"]:
            timer = threading.Timer(fault["delay_s"], act)
            timer.daemon = True
            timer.start()
        else:
            act()


def rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "-1"))


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1_000_000.0)


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(1_000_000)


ACTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": spin,
    "sleep": sleep,
    "gil": hold_gil,
}


def arm() -> None:
    sys.settrace(Tracer(json.loads(Path(os.environ["STRANGERS_ORDERS"]).read_text())))


if "STRANGERS_ORDERS" in os.environ:
    arm()
    os.register_at_fork(after_in_child=arm)
