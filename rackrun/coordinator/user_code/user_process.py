"""A process in which user code runs, as its parent sees it: lines go down, lines come up, and nothing blocks.

`rackrun.coordinator.user_code.child_setup` is the other side. Everything runs on the event loop's thread. A process is never waited for, but where
that is said: user code may hang in a file system, and not die.
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
    """``python -m MODULE FD ARGUMENT``, in a session of its own: the terminal's Ctrl-C is not for it. Raises OSError when it cannot be
    started.

    ``heard`` gets each line that it writes to FD; ``over`` the reason, once, why it is of no use any more. It is for its owner to kill it then.
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
        loop = asyncio.get_running_loop()
        loop.add_reader(self._up, self._read, heard, over)
        loop.add_reader(self._end, self._ended, heard, over)

    def write(self, line: bytes) -> None:
        """What the pipe takes now; the rest when it takes more."""
        self._out += line + b"\n"
        self._flush()

    def kill(self) -> None:
        """With what it has started, unless that has left its process group. Does not wait."""
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
        """Whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def first_line(self, deadline: float) -> bytes:
        """Waits. What there is of it, if the process ends. Raises TimeoutError."""
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
        """What it has said is in the pipe, which a copy that user code has made of it may hold open."""
        self._read(heard, over)
        if not self._killed:
            over(_ENDED)


class UserProcesses:
    """One that is in use, at most, and those before it that have not died yet."""

    def __init__(self) -> None:
        self.now: UserProcess | None = None
        self._dying: list[UserProcess] = []

    def pids(self) -> list[int]:
        self.reap()
        return [process.pid for process in (self.now, *self._dying) if process is not None]

    def end(self) -> None:
        """The one in use."""
        process, self.now = self.now, None
        if process is not None:
            process.kill()
            self._dying.append(process)
        self.reap()

    def close(self) -> None:
        """All. Waits two seconds for each."""
        self.end()
        for process in self._dying:
            process.reap(_REAP_S)
        self.reap()

    def reap(self) -> None:
        self._dying = [process for process in self._dying if not process.reap()]


def first_line(module: str, argument: str) -> bytes:
    """Of a process that is started for it, and killed then. Raises OSError in words when it cannot be started, or says nothing for a minute."""
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
