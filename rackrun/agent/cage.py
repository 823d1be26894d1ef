"""The process around one filler, between it and its agent: what the filler starts stays below it, and ends when it says so.

``python -m rackrun.agent.cage AGENT ORDER``: the agent's process id, and an `Order` as JSON. Standard input is the agent's:
a byte says that the slot is needed (SIGTERM, and SIGKILL after the grace time); its end, that all is to end at once. The
exit code is the filler's, 128 + N after signal N. By then nothing of the filler lives: this process is the subreaper of all that is
below it, and leaves when the kernel says that there is nobody. It imports little, and is small.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import NoReturn, TypedDict

from rackrun.agent import proc
from rackrun.agent.cgroup import Cgroup
from rackrun.agent.idle import finish_off, lower, lower_session

__all__ = ["EXEC_FAILED", "Order"]

EXEC_FAILED = 127
_AGAIN_MS = 2
"""Between two looks for what is still alive below us."""


_SESSIONS_MS = 1000
"""Between two looks for sessions that the filler has made."""


class Order(TypedDict):
    command: list[str]
    grace_s: float
    cpus: list[int]
    cgroup: str
    """"": there is none."""


class _Cage:
    def __init__(self, order: Order) -> None:
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
        self._pid = self._start()

    def run(self) -> int:
        """Until nothing of the filler is left; returns its exit code."""
        deadline: float | None = None
        while self._status is None:
            if deadline is not None and time.monotonic() >= deadline:
                break
            left_ms = _SESSIONS_MS if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            for fd, _ in self._poll.poll(left_ms):
                if fd == 0 and deadline is None:
                    deadline = time.monotonic() + (self._order["grace_s"] if self._tell() else 0.0)
                    self._poll.unregister(0)
            self._rest()
            if deadline is None:
                self._lower_sessions()
        self._end_all()
        code, number = proc.exit_code_and_signal(self._status or 0)
        return code if code is not None else 128 + (number or 0)

    def _lower_sessions(self) -> None:
        seen = set()
        for pid in proc.descendants_now(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                session = os.getsid(pid)
                seen.add(session)
                if session not in self._sessions:
                    lower_session(pid)
        self._sessions = seen

    def _tell(self) -> bool:
        """False: there is no agent any more, or no time."""
        if os.read(0, 1) == b"":
            return False
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self._pid, signal.SIGTERM)
            except ProcessLookupError:  # it has no group of its own yet
                os.kill(self._pid, signal.SIGTERM)
        return True

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
            self._cgroup.join()  # before the next line: it takes a lock that everybody who forks or exits waits for
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
        """Kill, look again, until we have no child: then there is nobody, since orphans become our children."""
        while self._rest():
            if self._cgroup is not None:
                self._cgroup.kill()
            finish_off(proc.descendants_now(os.getpid()))
            self._poll.poll(_AGAIN_MS)
        if self._cgroup is not None:
            self._cgroup.remove()

    def _rest(self) -> bool:
        """Reap who has ended. False: no child is left."""
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


def _main() -> NoReturn:
    # SIGCONT, not SIGKILL: when the agent dies we must run, even if stopped, and take the filler with us.
    proc.die_with(int(sys.argv[1]), signal.SIGCONT)
    proc.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    order: Order = json.loads(sys.argv[2])
    os._exit(_Cage(order).run())


if __name__ == "__main__":
    _main()
