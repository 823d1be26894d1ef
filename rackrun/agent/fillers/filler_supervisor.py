"""Supervisor process between an agent and one filler: all processes that the filler starts stay below it, and it ends
them all.

`main` takes as arguments the agent's process id and an `FillerOrder` as JSON. Standard input comes from the agent. `NOW`: the
filler must end (SIGTERM, then SIGKILL after the grace time). `HELD`: the same, but it is stopped for a moment first,
while the worker that needs the slot needs the processors most. End of input: everything must end at once. The exit code
is the filler's, or 128 + N after signal N. When this process exits, no process of the filler is alive: it is the
subreaper of all its descendants, and exits when the kernel reports that it has no child left. It imports little, only
modules of Python's own, and is small.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from typing import NoReturn, TypedDict

from rackrun.agent.host import proc
from rackrun.agent.host.cgroup import Cgroup
from rackrun.agent.host.priority import finish_off, first_to_go, lower, lower_session

__all__ = ["EXEC_FAILED", "HELD", "NOW", "FillerOrder", "main"]

NOW, HELD = b".", b"h"

EXEC_FAILED = 127
_AGAIN_MS = (2, 20)
"""Milliseconds between two looks for living descendants: at first, and when a process does not die."""
_STOPS = 5
"""Largest number of looks for processes to stop."""
_SESSIONS_S = 1.0
"""Seconds between two looks for new sessions, whose priority has to be lowered."""


class FillerOrder(TypedDict):
    """What a supervisor is asked to run, as JSON."""

    command: list[str]
    hold_s: float
    """Seconds for which the filler is stopped before it is told to end, if the agent asks for that."""
    grace_s: float
    cpus: list[int]
    cgroup: str
    """Path of the filler's control group; "": there is none."""
    last_in_line: bool
    """Whether the filler gets the lowest processor priority."""


class _Supervisor:
    def __init__(self, order: FillerOrder) -> None:
        self._order = order
        self._cgroup = Cgroup(order["cgroup"]) if order["cgroup"] else None
        self._woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(0, select.POLLIN)
        self._status: int | None = None
        self._sessions: set[int] = set()
        self._sessions_at = 0.0
        self._pid = 0

    def run(self) -> int:
        """Run until no process of the filler is left; return its exit code."""
        if not self._poll.poll(0):  # otherwise the slot is needed already
            self._pid = self._start()
            self._watch()
        self._end_all()
        code, number = proc.exit_code_and_signal(self._status or 0)
        return code if code is not None else 128 + (number or 0)

    def _watch(self) -> None:
        """Wait until the filler has ended or its time is over."""
        told = deadline = math.inf
        while self._status is None:
            now = time.monotonic()
            if now >= deadline:
                return
            if now >= told:
                self._report_state()
                told, deadline = math.inf, now + self._order["grace_s"]
                continue
            for fd, _ in self._poll.poll(min(_SESSIONS_S, told - now, deadline - now) * 1e3):
                if fd == 0:
                    word = os.read(0, 1)
                    if word == b"":  # the agent is gone, or there is no time
                        return
                    told = time.monotonic() + (self._held() if word == HELD else 0.0)
            self._rest()
            if told == deadline == math.inf and self._order["last_in_line"]:
                self._lower_sessions()

    def _held(self) -> float:
        """Stop the filler; return for how many seconds."""
        before: set[int] = set()
        for _ in range(_STOPS):  # processes may fork during a look, or wake others
            found = set(proc.descendants_now(os.getpid()))
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # another user's, by its set-user-ID bit
                    os.kill(pid, signal.SIGSTOP)
            if found <= before:
                break
            before = found
        return self._order["hold_s"]

    def _lower_sessions(self) -> None:
        """Lower the priority of new sessions from time to time: every orphan that ends wakes this process, and there
        may be thousands."""
        if time.monotonic() < self._sessions_at:
            return
        self._sessions_at = time.monotonic() + _SESSIONS_S
        seen = set()
        for pid in proc.descendants_now(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                session = os.getsid(pid)
                seen.add(session)
                if session not in self._sessions:
                    lower_session(pid)
        self._sessions = seen

    def _report_state(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self._pid, signal.SIGTERM)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(self._pid, signal.SIGTERM)
        for pid in proc.descendants_now(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def _start(self) -> int:
        cage = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                proc.die_with(cage)
                self._become_filler()
            finally:
                os._exit(EXEC_FAILED)
        return pid

    def _become_filler(self) -> NoReturn:
        order = self._order
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        os.setsid()
        if self._cgroup is not None:
            self._cgroup.join()  # before the next line: it takes a lock that forks and exits wait for
        first_to_go()
        if order["last_in_line"]:
            lower()
        if order["cpus"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, order["cpus"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os.execvp(order["command"][0], order["command"])
        except OSError as error:
            print(
                f"rackrun: cannot run the filler {order['command'][0]}: {error.strerror}", file=sys.stderr, flush=True
            )
            os._exit(EXEC_FAILED)

    def _end_all(self) -> None:
        """Kill descendants until no child is left. Orphans become children of this process, so then there are none."""
        pause_ms, longest_ms = _AGAIN_MS
        while self._rest():
            if self._cgroup is not None:
                self._cgroup.kill()
            finish_off(proc.descendants_now(os.getpid()))
            self._poll.poll(pause_ms)
            pause_ms = min(pause_ms + 1, longest_ms)
        if self._cgroup is not None:
            self._cgroup.remove()

    def _rest(self) -> bool:
        """Reap children that have exited. Return False if no child is left."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._status = status


def main() -> NoReturn:
    # SIGCONT, not SIGKILL: when the agent dies we must run, even if stopped, and take the filler with us.
    proc.die_with(int(sys.argv[1]), signal.SIGCONT)
    try:
        proc.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        order: FillerOrder = json.loads(sys.argv[2])
        os._exit(_Supervisor(order).run())
    except BaseException:  # noqa: BLE001 - the agent looks for what a killed cage has left
        traceback.print_exc()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")
