"""Parent's side of a process that runs user code: lines are exchanged over pipes, and nothing blocks.

`rackrun.coordinator.user_code.child_setup` is the child's side. Everything runs on the event loop's thread. A process
is waited for only where this is stated: user code may hang in a file system, and then does not die.
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

__all__ = ["UserProcess", "UserProcesses", "first_line"]

_LINE_BYTES_MAX = 1 << 20
_LOAD_S = 60.0
_REAP_S = 2.0
_ENDED = "has ended its process"


class UserProcess:
    """``python -m MODULE FD ARGUMENT`` in a session of its own, so that the terminal's Ctrl-C does not reach it.

    Raises OSError if it cannot be started. ``heard`` receives each line that it writes to FD. ``over`` receives, once,
    the reason why the process is of no use any more; its owner must kill it then.
    """

    def __init__(self, module: str, argument: str) -> None:
        self._up, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), argument],
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs,),
                start_new_session=True,
            )
            self._end = os.pidfd_open(self._process.pid)
        except BaseException:
            os.close(self._up)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        self.pid, self._down = self._process.pid, self._process.stdin.fileno()
        self._killed = False
        self._out = bytearray()
        self._in = bytearray()
        os.set_blocking(self._up, False)
        os.set_blocking(self._down, False)

    def listen(self, heard: Callable[[bytes], None], over: Callable[[str], None]) -> None:
        """Call ``heard`` with each line of output, and ``over`` with the reason when the process has ended."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._up, self._read, heard, over)
        loop.add_reader(self._end, self._ended, heard, over)

    def write(self, line: bytes) -> None:
        """Write a line without blocking: as much as the pipe takes now, and the rest later."""
        self._out += line + b"\n"
        self._flush()

    def kill(self) -> None:
        """Kill the process and everything it has started that is still in its process group. Does not wait."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(RuntimeError):  # no loop any more
            loop = asyncio.get_running_loop()
            loop.remove_writer(self._down)
            loop.remove_reader(self._up)
            loop.remove_reader(self._end)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._up)
        os.close(self._end)

    def reap(self, within_s: float = 0.0) -> bool:
        """Wait up to ``within_s`` seconds; return whether the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def first_line(self, deadline: float) -> bytes:
        """Wait for the first line and return it; if the process ends, what there is of it. Raises TimeoutError at
        ``deadline``."""
        line = b""
        poll = select.poll()
        poll.register(self._up, select.POLLIN)
        poll.register(self._end, select.POLLIN)
        while b"\n" not in line and len(line) <= _LINE_BYTES_MAX:
            if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1e3):
                raise TimeoutError
            try:
                data = os.read(self._up, 1 << 16)
            except BlockingIOError:  # it has ended; a copy of it may hold the pipe open
                break
            if not data:
                break
            line += data
        return line.partition(b"\n")[0]

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._out:
                del self._out[: os.write(self._down, self._out)]
        except BlockingIOError:
            loop.add_writer(self._down, self._flush)
            return
        except BrokenPipeError:
            self._out.clear()  # it has ended; the reader sees that as well
        loop.remove_writer(self._down)

    def _read(self, heard: Callable[[bytes], None], over: Callable[[str], None]) -> None:
        try:
            data = os.read(self._up, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            over(_ENDED)
            return
        *lines, rest = bytes(self._in + data).split(b"\n")
        self._in[:] = rest
        for line in lines:
            if not self._killed:
                heard(line)
        if not self._killed and len(self._in) > _LINE_BYTES_MAX:
            over(f"said more than {_LINE_BYTES_MAX} bytes in a line")

    def _ended(self, heard: Callable[[bytes], None], over: Callable[[str], None]) -> None:
        """Handle the process's end. Its last output is in the pipe, which a fork made by user code may hold open."""
        self._read(heard, over)
        if not self._killed:
            over(_ENDED)


class UserProcesses:
    """At most one process in use, and earlier ones that have not died yet."""

    def __init__(self) -> None:
        self.now: UserProcess | None = None
        self._dying: list[UserProcess] = []

    def pids(self) -> list[int]:
        self.reap()
        return [process.pid for process in (self.now, *self._dying) if process is not None]

    def end(self) -> None:
        """End the process in use."""
        process, self.now = self.now, None
        if process is not None:
            process.kill()
            self._dying.append(process)
        self.reap()

    def close(self) -> None:
        """End all processes, waiting up to two seconds for each."""
        self.end()
        for process in self._dying:
            process.reap(_REAP_S)
        self.reap()

    def reap(self) -> None:
        """Reap the killed processes that have ended."""
        self._dying = [process for process in self._dying if not process.reap()]


def first_line(module: str, argument: str) -> bytes:
    """Start a process, return its first line and kill it.

    Raises OSError, with a readable text, if it cannot be started or is silent for a minute.
    """
    try:
        process = UserProcess(module, argument)
    except (OSError, ValueError) as error:  # ValueError: no program's argument may have a zero byte
        raise OSError(f"cannot be loaded: {error}") from error
    try:
        return process.first_line(time.monotonic() + _LOAD_S)
    except TimeoutError:
        raise TimeoutError(f"is not loaded within {_LOAD_S:.0f} s") from None
    finally:
        process.kill()
        process.reap(_REAP_S)
