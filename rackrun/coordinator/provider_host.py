"""Hosts the provider of racks, in a process of its own: whatever it does, the coordinator goes on.

How long a request may take is the core's to say. A release has `RELEASE_S`; with one that takes longer the process is ended, and what was
under way in it has failed. Another is started for the next request or release, which names the rack as before. Everything runs on the event
loop's thread, and nothing blocks.
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
from typing import Any

import msgspec

from rackrun.coordinator.provider_child import Downward, Hello, Loaded, Released, Upward
from rackrun.core.commands import ReleaseRack, RequestRack
from rackrun.core.events import RackDelivered, RackPreempted, RackRefused
from rackrun.errors import UsageError

__all__ = ["RELEASE_S", "ProviderHost", "check"]

RELEASE_S = 30.0
_LINE_BYTES_MAX = 1 << 20
_LOAD_S = 60.0
_REAP_S = 2.0
_REMEDY = (
    "name a function that gives a provider as MODULE:FUNCTION or MODULE:FUNCTION:ARGS, with the module in this directory or in "
    "PYTHONPATH, or say local; see docs/providers.md."
)

_upward: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Upward)


def check(spec: str) -> float | None:
    """Load it once, before anything is started. How long a request takes, as it says. Raises UsageError when it cannot be loaded."""
    process, expected_s = _Process(spec), None
    try:
        line = process.first_line(time.monotonic() + _LOAD_S)
        loaded = msgspec.json.decode(line, type=Loaded)
        trouble, expected_s = loaded.trouble, loaded.expected_s
    except TimeoutError:
        trouble = f"is not loaded within {_LOAD_S:.0f} s"
    except msgspec.MsgspecError:
        trouble = "ends the process in which it is loaded"
    finally:
        process.kill()
        process.reap(_REAP_S)
    if trouble:
        raise UsageError(f"the provider {spec} {trouble}.", remedy=_REMEDY)
    return expected_s


class ProviderHost:
    """``deliver`` gets what the provider says of requests; ``notice`` what people are to know besides."""

    def __init__(
        self,
        spec: str,
        hello: Hello,
        deliver: Callable[[RackDelivered | RackRefused | RackPreempted], None],
        notice: Callable[[str], None],
        *,
        release_s: float = RELEASE_S,
    ) -> None:
        self._spec = spec
        self._hello = hello
        self._deliver = deliver
        self._notice = notice
        self._release_s = release_s
        self._process: _Process | None = None
        self._dying: list[_Process] = []
        self._out = bytearray()
        self._in = bytearray()
        self._known: dict[int, None] = {}  # what this process was asked for, and has not refused or released
        self._left: dict[int, None] = {}  # asked for in the whole job, and not released
        self._releasing: dict[int, asyncio.TimerHandle] = {}
        self._all_released = asyncio.Event()

    def start(self) -> None:
        self._reap()
        self._in.clear()
        self._out.clear()
        try:
            self._process = _Process(self._spec)
        except OSError as error:
            self._over(f"cannot be started: {error}")
            return
        asyncio.get_running_loop().add_reader(self._process.answers, self._read)
        self._write(self._hello)

    def pids(self) -> list[int]:
        """Ours, those that are being killed too."""
        self._reap()
        return [process.pid for process in (self._process, *self._dying) if process is not None]

    def provide(self, command: RequestRack | ReleaseRack) -> None:
        if isinstance(command, RequestRack):
            self._known[command.request] = self._left[command.request] = None
        elif command.request in self._releasing:
            return
        else:
            late = asyncio.get_running_loop().call_later(self._release_s, self._too_late, command.request)
            self._releasing[command.request] = late
        if self._process is None:
            self.start()
        if self._process is not None:
            self._write(command)

    async def end(self, grace_s: float) -> None:
        """The job is over: release what there is, at most ``grace_s``, and close."""
        for request in list(self._left):
            self.provide(ReleaseRack(request=request, because="the job is over"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._left:
                    self._all_released.clear()
                    await self._all_released.wait()
        for request in self._left:
            self._notice(f"rack {request} was not released within {grace_s:g} s: see whether it is left behind")
        self._left.clear()
        self.close()

    def close(self) -> None:
        for timer in self._releasing.values():
            timer.cancel()
        self._releasing.clear()
        self._known.clear()
        self._end()
        for process in self._dying:
            process.reap(_REAP_S)
        self._reap()

    # -- what it says
    def _heard(self, line: bytes) -> None:
        try:
            message: Upward = _upward.decode(line)
        except msgspec.MsgspecError as error:
            self._over(f"said what cannot be read: {error}")
            return
        match message:
            case Loaded():
                if message.trouble:
                    self._over(message.trouble)
            case Released():
                self._released(message.request, message.trouble)
            case RackRefused():
                self._known.pop(message.request, None)
                if not message.failed and message.request not in self._releasing:
                    self._left.pop(message.request, None)
                self._deliver(message)
            case RackDelivered() | RackPreempted():
                self._deliver(message)

    def _released(self, request: int, trouble: str) -> None:
        timer = self._releasing.pop(request, None)
        if timer is not None:
            timer.cancel()
        self._known.pop(request, None)
        self._left.pop(request, None)
        if trouble:
            self._notice(f"rack {request} could not be released, see whether it is left behind: {trouble}")
        self._all_released.set()

    def _too_late(self, request: int) -> None:
        self._released(request, f"the provider did not do it within {self._release_s:g} s, and its process is ended")
        self._over(f"hung in the release of rack {request}, and was ended")

    def _over(self, trouble: str) -> None:
        """The process is of no use any more: nothing comes of what it was asked for."""
        self._end()
        for request in list(self._releasing):
            self._released(request, f"the provider {trouble}")
        known, self._known = list(self._known), {}
        for request in known:
            self._deliver(RackRefused(request=request, because=f"the provider {trouble}", failed=True))

    # -- pipes
    def _write(self, message: Downward | None = None) -> None:
        """What the pipe takes; the rest when it takes more."""
        if message is not None:
            self._out += msgspec.json.encode(message) + b"\n"
        assert self._process is not None
        into, loop = self._process.commands, asyncio.get_running_loop()
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
        process = self._process
        assert process is not None
        try:
            data = os.read(process.answers, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._over("has ended its process")
            return
        *lines, rest = bytes(self._in + data).split(b"\n")
        self._in[:] = rest
        for line in lines:
            if self._process is process:
                self._heard(line)
        if self._process is process and len(self._in) > _LINE_BYTES_MAX:
            self._over(f"said more than {_LINE_BYTES_MAX} bytes")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(RuntimeError):  # no loop any more
            loop = asyncio.get_running_loop()
            loop.remove_writer(process.commands)
            loop.remove_reader(process.answers)
        process.kill()
        self._dying.append(process)
        self._reap()

    def _reap(self) -> None:
        self._dying = [process for process in self._dying if not process.reap()]


class _Process:
    """Of a provider, in a session of its own: the terminal's Ctrl-C is not for it. Raises OSError when it cannot be started."""

    def __init__(self, spec: str) -> None:
        self.answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rackrun.coordinator.provider_child", str(theirs), spec],
                stdin=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except OSError:
            os.close(self.answers)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        self.pid, self.commands = self._process.pid, self._process.stdin.fileno()
        os.set_blocking(self.answers, False)
        os.set_blocking(self.commands, False)

    def kill(self) -> None:
        """With what it has started, unless that has left its process group. Does not wait: it may hang in a file system."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self.answers)

    def reap(self, within_s: float = 0.0) -> bool:
        """Whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def first_line(self, deadline: float) -> bytes:
        """What there is of it, if the process ends. Raises TimeoutError."""
        line = b""
        while b"\n" not in line and len(line) <= _LINE_BYTES_MAX:
            if not select.select([self.answers], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise TimeoutError
            data = os.read(self.answers, 1 << 16)
            if not data:
                break
            line += data
        return line.partition(b"\n")[0]
