"""Asks the user's policy, in a process of its own, and waits a second at most: user code neither stops nor breaks the coordinator.

The process is started before it is needed and lives on between questions. One that takes too long is killed, and another is started
for the next question. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable

import msgspec

from rackrun.core.commands import AskPolicy
from rackrun.core.events import PolicyAnswered
from rackrun.errors import UsageError

__all__ = ["ANSWER_S", "PolicyHost", "check"]

ANSWER_S = 1.0
_LOAD_S = 60.0
_REMEDY = (
    "name a function of (failure, view) as MODULE:FUNCTION, with the module in this directory or in PYTHONPATH; "
    "see docs/policies.md."
)


def check(function: str) -> None:
    """Load it once, before anything is started. Raises UsageError when that fails."""
    try:
        done = subprocess.run(_command(function), input=b"", stdout=subprocess.PIPE, timeout=_LOAD_S, check=False)
        trouble = msgspec.json.decode(done.stdout.partition(b"\n")[0], type=PolicyAnswered).trouble
    except subprocess.TimeoutExpired:
        trouble = f"is not loaded within {_LOAD_S:.0f} s"
    except msgspec.MsgspecError:
        trouble = "ends the process in which it is loaded"
    if trouble:
        raise UsageError(f"the policy {function} {trouble}.", remedy=_REMEDY)


class PolicyHost:
    """``deliver`` gets one `PolicyAnswered` for every question."""

    def __init__(self, function: str, deliver: Callable[[PolicyAnswered], None], *, answer_s: float = ANSWER_S) -> None:
        self._function = function
        self._deliver = deliver
        self.answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._out = bytearray()  # to be written
        self._in = bytearray()
        self._loaded = False
        self._open: int | None = None  # the question that waits for its answer
        self._late: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._loaded = False
        self._in.clear()
        self._process = subprocess.Popen(
            _command(self._function), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        for pipe in self._pipes():
            os.set_blocking(pipe, False)
        loop.add_reader(self._pipes()[1], self._read)
        if self._out:
            self._write()

    def pids(self) -> list[int]:
        return [] if self._process is None else [self._process.pid]

    def ask(self, command: AskPolicy) -> None:
        """A question that is still open is dropped: nobody waits for its answer any more."""
        if self._open is not None:
            self._settle()
            self._end()
        self._open = command.question
        self._late = asyncio.get_running_loop().call_later(self.answer_s, self._too_late)
        self._out[:] = msgspec.json.encode(command) + b"\n"
        if self._process is None:
            self.start()
        else:
            self._write()

    def close(self) -> None:
        self._settle()
        self._end()

    def _write(self) -> None:
        """What the pipe takes; the rest when it takes more."""
        into = self._pipes()[0]
        loop = asyncio.get_running_loop()
        try:
            while self._out:
                del self._out[: os.write(into, self._out)]
        except BlockingIOError:
            loop.add_writer(into, self._write)
            return
        except BrokenPipeError:
            self._out.clear()  # it has ended; the reader sees that as well
        loop.remove_writer(into)

    def _read(self) -> None:
        try:
            data = os.read(self._pipes()[1], 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._ended()
            return
        self._in += data
        while self._process is not None and b"\n" in self._in:
            line, _, rest = bytes(self._in).partition(b"\n")
            self._in[:] = rest
            try:
                answered = msgspec.json.decode(line, type=PolicyAnswered)
            except msgspec.MsgspecError as error:
                self._give_up(f"answered what cannot be read: {error}")
                return
            self._heard(answered)

    def _heard(self, answered: PolicyAnswered) -> None:
        if answered.question == 0:
            self._loaded = not answered.trouble
            if answered.trouble:
                self._give_up(answered.trouble)
        elif answered.question == self._open:
            self._settle()
            self._deliver(answered)

    def _too_late(self) -> None:
        self._give_up(f"gave no answer within {self.answer_s:g} s")
        self._start_again()

    def _ended(self) -> None:
        loaded = self._loaded
        self._give_up("has ended its process")
        if loaded:
            self._start_again()

    def _start_again(self) -> None:
        if self._process is None:  # else: what was delivered has led to another question
            self.start()

    def _give_up(self, trouble: str) -> None:
        self._end()
        question = self._open
        self._settle()
        if question is not None:
            self._deliver(PolicyAnswered(question=question, trouble=trouble))

    def _settle(self) -> None:
        self._open = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self._process is None:
            return
        process, pipes = self._process, self._pipes()
        self._process = None
        self._out.clear()
        with contextlib.suppress(RuntimeError):  # no loop any more
            loop = asyncio.get_running_loop()
            loop.remove_writer(pipes[0])
            loop.remove_reader(pipes[1])
        process.kill()
        process.wait()
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def _pipes(self) -> tuple[int, int]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin.fileno(), process.stdout.fileno()


def _command(function: str) -> list[str]:
    return [sys.executable, "-m", "rackrun.coordinator.policy_child", function]
