"""Asks the user's policy, in a process of its own, and waits a second at most: user code neither stops nor breaks the coordinator.

The process is started before it is needed and lives on between questions. One that takes too long is killed, with what it has started,
and another is started for the next question. Nothing here blocks: not even a process that cannot be killed is waited for. Everything
runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from rackrun.core.commands import AskPolicy
from rackrun.core.events import PolicyAnswered
from rackrun.errors import UsageError

__all__ = ["ANSWER_S", "PolicyHost", "check"]

ANSWER_S = 1.0
_ANSWER_BYTES_MAX = 1 << 20
_LOAD_S = 60.0
_REAP_S = 2.0
_REMEDY = (
    "name a function of (failure, view) as MODULE:FUNCTION, with the module in this directory or in PYTHONPATH; "
    "see docs/policies.md."
)


def check(function: str) -> None:
    """Load it once, before anything is started. Raises UsageError when that fails."""
    process = _spawn(function)
    try:
        line = _first_line(process, time.monotonic() + _LOAD_S)
        trouble = msgspec.json.decode(line, type=PolicyAnswered).trouble
    except TimeoutError:
        trouble = f"is not loaded within {_LOAD_S:.0f} s"
    except msgspec.MsgspecError:
        trouble = "ends the process in which it is loaded"
    finally:
        _kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
    if trouble:
        raise UsageError(f"the policy {function} {trouble}.", remedy=_REMEDY)


class PolicyHost:
    """Asks the function that each question names. ``deliver`` gets one `PolicyAnswered` for a question, unless another was asked meanwhile: nobody waits for it any more."""

    def __init__(self, function: str, deliver: Callable[[PolicyAnswered], None], *, answer_s: float = ANSWER_S) -> None:
        self._function = function
        self._deliver = deliver
        self.answer_s = answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._out = bytearray()  # to be written
        self._in = bytearray()
        self._loaded = False
        self._asked: AskPolicy | None = None  # in the function's hands
        self._next: AskPolicy | None = None  # has overtaken it
        self._late: asyncio.TimerHandle | None = None

    def use(self, function: str) -> None:
        """It will be asked from now on: load it. What is being asked at the moment has its time."""
        if self._asked is None and function != self._function:
            self._end()
            self._function = function
            self.start()

    def start(self) -> None:
        self._reap()
        self._loaded = False
        self._in.clear()
        try:
            self._process = _spawn(self._function)
        except OSError as error:
            self._fail(f"cannot be started: {error}")
            return
        for pipe in self._pipes():
            os.set_blocking(pipe, False)
        asyncio.get_running_loop().add_reader(self._pipes()[1], self._read)
        if self._out:
            self._write()

    def pids(self) -> list[int]:
        """Ours, those that are being killed too."""
        self._reap()
        return [process.pid for process in (self._process, *self._dying) if process is not None]

    def ask(self, command: AskPolicy) -> None:
        """One that is still open is answered first, or has had its time; that answer is dropped."""
        if self._asked is not None:
            self._next = command
        else:
            self._put(command)

    def close(self) -> None:
        self._asked = self._next = None
        self._disarm()
        self._end()
        for process in self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        self._reap()

    # -- questions and answers
    def _put(self, command: AskPolicy) -> None:
        if command.function != self._function:
            self._end()
            self._function = command.function
        self._asked = command
        self._late = asyncio.get_running_loop().call_later(self.answer_s, self._too_late)
        self._out += msgspec.json.encode(command) + b"\n"
        if self._process is None:
            self.start()
        else:
            self._write()

    def _settle(self, answered: PolicyAnswered) -> None:
        self._disarm()
        self._asked, overtaken_by, self._next = None, self._next, None
        if overtaken_by is None:
            self._deliver(answered)
        else:
            self._put(overtaken_by)

    def _too_late(self) -> None:
        if self._loaded:
            self._fail(f"gave no answer within {self.answer_s:g} s")
        elif self._asked is not None:  # what loads goes on: killed now, it would be as far next time
            self._settle(PolicyAnswered(question=self._asked.question, trouble="is still being loaded"))

    def _fail(self, trouble: str) -> None:
        """The process is of no use any more. Without a question nobody needs another: it may end as soon as it is started."""
        self._end()
        if self._asked is None:
            return
        begun = self._loaded
        self._settle(PolicyAnswered(question=self._asked.question, trouble=trouble))
        if begun and self._process is None:
            self.start()

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # -- pipes
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
            data = os.read(self._pipes()[1], 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._fail("has ended its process")
            return
        *lines, rest = bytes(self._in + data).split(b"\n")
        self._in[:] = rest
        process = self._process
        for line in lines:
            if self._process is process:
                self._heard(line)
        if self._process is process and len(self._in) > _ANSWER_BYTES_MAX:
            self._fail(f"answered more than {_ANSWER_BYTES_MAX} bytes")

    def _heard(self, line: bytes) -> None:
        try:
            answered = msgspec.json.decode(line, type=PolicyAnswered)
        except msgspec.MsgspecError as error:
            self._fail(f"answered what cannot be read: {error}")
            return
        if answered.question == 0:
            self._loaded = not answered.trouble
            if answered.trouble:
                self._fail(answered.trouble)
        elif self._asked is not None and answered.question == self._asked.question:
            self._settle(answered)

    def _pipes(self) -> tuple[int, int]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin.fileno(), process.stdout.fileno()

    # -- the end of a process
    def _end(self) -> None:
        self._out.clear()
        if self._process is None:
            return
        process, pipes = self._process, self._pipes()
        self._process = None
        with contextlib.suppress(RuntimeError):  # no loop any more
            loop = asyncio.get_running_loop()
            loop.remove_writer(pipes[0])
            loop.remove_reader(pipes[1])
        _kill(process)
        self._dying.append(process)
        self._reap()

    def _reap(self) -> None:
        self._dying = [process for process in self._dying if process.poll() is None]


def _spawn(function: str) -> subprocess.Popen[bytes]:
    """In a session of its own: the terminal's Ctrl-C is not for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rackrun.coordinator.policy_child", function],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, unless that has left its process group. Does not wait: it may hang in a file system."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
    for file in (process.stdin, process.stdout):
        assert file is not None
        file.close()


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """What there is of it, if the process ends. Raises TimeoutError."""
    assert process.stdout is not None
    line = b""
    while b"\n" not in line and len(line) <= _ANSWER_BYTES_MAX:
        if not select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            raise TimeoutError
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        line += data
    return line.partition(b"\n")[0]
